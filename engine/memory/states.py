"""Bytes of model states that one rank holds, by ZeRO stage (Rajbhandari et al., 2020, arXiv:1910.02054) and offload.

With P parameters, N shards and d bytes of compute precision, FSDP2 holds:

- fp32 masters 4P/N and Adam moments 8P/N; N = 1 at stage 0,
- gathered copies dP from forward until backward at stages 0 to 2; the root unit and two others at a time at stage 3,
- fp32 gradients 4P at stage 0, and at stage 1 while micro-batches accumulate; otherwise 4P/N.

One rank without offload uses no FSDP2: copies dP where d < 4, gradients 4P, at every stage.

With an offloaded optimizer the device holds shards of dP/N. The host holds masters, moments and reduced gradients (dP/N
where a step reduces once, otherwise 4P/N). On NVMe masters and moments are in files, and the host buffers
`SUB_GROUPS_IN_FLIGHT` sub-groups of them.
"""

import math
from dataclasses import dataclass, field

from engine.config import EngineConfig, OptimizerConfig, Precision
from engine.memory.model_shape import ModelShape
from engine.optim import averages_itself, moment_names

Owners = dict[str, int]  # bytes by owner
BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SUB_GROUPS_IN_FLIGHT = 4
RESTING = ("parameters", "optimizer", "average")  # owners on the device between steps
STATES = (*RESTING, "gathered", "gradients", "host", "host_gradients", "nvme")
OFFLOADED = {"cpu": "host", "nvme": "nvme"}  # owner of the offloaded bytes of each tier


@dataclass(frozen=True)
class Workload:
    """The layout of a model, and the micro-batches that it trains on. Lengths count tokens.

    ranks: ranks that share the states; a tensor group or a pipeline counts once. step_tokens: one rank's tokens of an
    optimizer step (0: unknown, several micro-batches). item_sequences: sequences of one training item, which share a
    micro-batch (2 for a pair). adapters: trained parameters next to a frozen model (0: all parameters train). packed:
    the frozen weights in packed layers, which need packed_bytes. has_average: a moving average of the parameters
    exists. has_other_loss: each step has micro-batches of a second data source. is_cpu: the device is the host.
    """

    config: EngineConfig = field(default_factory=EngineConfig)
    ranks: int = 1
    micro_batch_tokens: int = 8192
    max_length: int = 1024
    step_tokens: int = 0
    item_sequences: int = 1
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))
    has_average: bool = False
    has_other_loss: bool = False
    adapters: int = 0
    packed: int = 0
    packed_bytes: int = 0
    is_cpu: bool = False

    @property
    def min_tokens(self) -> int:
        """Tokens of a micro-batch of one item, which is never split."""
        return self.item_sequences * self.max_length

    @property
    def rank_tokens(self) -> int:
        """Tokens of the largest micro-batch on one rank."""
        return math.ceil(max(self.micro_batch_tokens, self.min_tokens) / self.config.sequence_parallel)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step. A pipeline has at least one for each stage."""
        return max(self.config.pipeline_parallel, math.ceil(self.step_tokens / self.micro_batch_tokens))

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.step_tokens == 0 or self.micro_batches > 1 or self.has_other_loss

    @property
    def shards(self) -> int:
        """Shards of a model's states."""
        return 1 if self.config.zero_stage == 0 else self.config.shard_ranks or self.ranks

    @property
    def is_single(self) -> bool:
        """Whether one rank has all states."""
        return self.ranks == 1 and self.config.tensor_parallel == 1

    def trained(self, shape: ModelShape) -> int:
        """Return the trained parameters of a model."""
        return self.adapters or shape.parameters


def trained_states(shape: ModelShape, work: Workload) -> Owners:
    """Return the bytes of each owner in `STATES` for a model that trains.

    "gathered", "gradients" and "host_gradients" exist while the model trains, the other owners also between steps. Over
    packed layers, only the adapters have fp32 masters. The other frozen parameters are in compute precision.
    """
    config, size, shards = work.config, BYTES[work.config.dtype], work.shards
    trained, moments = work.trained(shape), len(moment_names(work.optimizer))
    masters = work.adapters if work.packed else shape.parameters + work.adapters
    frozen = size * (shape.parameters - work.packed) if work.packed else 0
    number = 2 if config.states == "bf16" else 4  # bytes of a master and of a moment
    gradients = 4 * trained if config.zero_stage == 0 or (config.zero_stage == 1 and work.accumulates) else 0
    owners = dict.fromkeys(STATES, 0)
    if config.offload_optimizer == "none":
        on_device = trained // shards
        shard, gradient = number * masters // shards, number
    else:
        offloaded = round(config.offload_ratio * trained / shards)
        on_device = trained // shards - offloaded
        shard, gradient = size * masters // shards, 4 if work.accumulates and config.zero_stage >= 2 else size
        gradients = gradients if work.accumulates else 0
        owners["parameters"] += 4 * on_device
        owners["host_gradients"] += gradient * offloaded
        if gradient < 4:  # the step casts the gradients of a sub-group to fp32
            owners["host"] += 4 * min(offloaded, config.sub_group_size)
        states = 4 * (1 + moments + work.has_average)
        owners[OFFLOADED[config.offload_optimizer]] += states * offloaded
        if config.offload_optimizer == "nvme":
            owners["host"] += states * min(offloaded, SUB_GROUPS_IN_FLIGHT * config.sub_group_size)
    owners["optimizer"] += number * moments * on_device
    if averages_itself(work.optimizer):  # 1-bit Adam's errors of the compression, on this rank and on the server
        owners["optimizer"] += 4 * trained + 4 * trained // work.ranks
    owners["average"] += number * work.has_average * on_device
    owners["gradients"] += gradients or gradient * on_device
    owners[OFFLOADED.get(config.offload_parameters, "parameters")] += shard
    if config.offload_parameters != "none" and config.offload_optimizer == "none":
        # Masters, moments and reduced gradients stay with the shards on the host.
        host = owners["host"] + owners["optimizer"] + owners["average"]
        owners |= {"optimizer": 0, "average": 0, "host": host, "host_gradients": 4 * on_device}
        owners["gradients"] = gradients if config.zero_stage == 1 else 0
    owners["parameters"] += work.packed_bytes + frozen // shards
    is_offloaded = {config.offload_optimizer, config.offload_parameters} != {"none"}
    if is_offloaded or not work.is_single or config.states == "bf16" or averages_itself(work.optimizer):
        owners["gathered"] = _gathered_bytes(shape, masters, config) + frozen
        if not (is_offloaded or work.accumulates or config.zero_stage == 3):
            # The last micro-batch frees the gathered copy of each block when the block's gradient exists.
            owners["gathered"] -= min(owners["gathered"], owners["gradients"])
    else:
        owners["gathered"] = size * masters if size < 4 else 0
    return owners


def frozen_states(shape: ModelShape, work: Workload) -> Owners:
    """Return the bytes of each owner in `STATES` for a model that only scores, in compute precision."""
    config, loose = work.config, shape.parameters - work.packed  # parameters outside of packed layers
    owners = dict.fromkeys(STATES, 0)
    shard = work.packed_bytes + BYTES[config.dtype] * loose // work.shards
    owners[OFFLOADED.get(config.offload_parameters, "parameters")] = shard
    if not work.is_single or config.offload_parameters != "none":
        owners["gathered"] = _gathered_bytes(shape, loose, config)
    return owners


def _gathered_bytes(shape: ModelShape, parameters: int, config: EngineConfig) -> int:
    """Return the bytes of gathered copies: of all parameters, or at stage 3 of the units in use and the next block."""
    if config.zero_stage == 3:
        parameters = min(parameters, shape.root_unit + shape.largest_released + shape.block)
    return BYTES[config.dtype] * parameters
