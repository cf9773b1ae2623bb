"""Bytes of model states that one rank holds, by ZeRO stage (Rajbhandari et al., 2020, arXiv:1910.02054) and offload.

With P parameters, N shards and d bytes of compute precision, FSDP2 holds:

- fp32 masters 4P/N and Adam moments 8P/N; N = 1 at stage 0; frozen parameters under adapters dP/N,
- gathered copies dP from forward until backward at stages 0 to 2; the root unit and two others at a time at stage 3,
  with `compress` also the 8 bits of the block that is gathered, and one shard of it in fp32,
- fp32 gradients 4P at stage 0, and at stage 1 while micro-batches accumulate; otherwise 4P/N,
- during backward, one unit's gradient twice: in compute precision, and in fp32 for the reduction; of adapters, the
  buffers of two gathers are larger.

One rank without offload uses no FSDP2: copies dP of the masters where d < 4, gradients 4P, at every stage. A model that
only scores uses no FSDP2 at stage 0, and has no copies.

Without an offloaded optimizer, masters and moments are next to the shards, also on the host. With one, the device holds
shards of dP/N, and during backward one unit's reduced gradient in fp32 and in compute precision. The host holds
masters, moments and reduced gradients (dP/N where a step reduces once, otherwise 4P/N). On NVMe masters and moments are
in files, and the host buffers `SUB_GROUPS_IN_FLIGHT` sub-groups of them.
"""

import math
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig, OptimizerConfig, Precision
from engine.memory.model_shape import ModelShape
from engine.optim import averages_itself, moment_names

Owners = dict[str, int]
BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SUB_GROUPS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Workload:
    """The layout of a model, and the micro-batches that it trains on. Lengths count tokens.

    ranks: ranks that share the states; a tensor group or a pipeline counts once. step_tokens: one rank's tokens of an
    optimizer step. item_sequences: sequences of one training item, which share a micro-batch (2 for a pair). adapters:
    trained parameters next to a frozen model (0: all parameters train). packed: the frozen weights in packed layers,
    which need packed_bytes. has_average: a moving average of the parameters exists. has_other_loss: each step has
    micro-batches of a second data source. is_cpu: the device is the host.
    """

    config: EngineConfig = field(default_factory=EngineConfig)
    ranks: int = 1
    micro_batch_tokens: int = 8192
    max_length: int = 1024
    step_tokens: int = 16384
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
        return self.micro_batches > 1 or self.has_other_loss

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


@dataclass(frozen=True)
class ModelStates:
    """Bytes of one model on one rank, at the peak of a step.

    Between steps the device holds `parameters` (masters, or shards in compute precision), `optimizer` (moments) and
    `average`. While the model trains, `gathered`, `gradients` and `reduction` come on top. `gathered` includes the
    `prefetched` block, and `overlap` bytes of it are freed before the last gradients exist. `host` includes
    `host_gradients`, which exist while the model trains; `nvme` is in files.
    """

    parameters: int = 0
    optimizer: int = 0
    average: int = 0
    gathered: int = 0
    prefetched: int = 0
    gradients: int = 0
    reduction: int = 0
    overlap: int = 0
    host: int = 0
    host_gradients: int = 0
    nvme: int = 0

    @property
    def resting(self) -> int:
        """Bytes on the device between steps."""
        return self.parameters + self.optimizer + self.average

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak of a step."""
        return self.resting + self.gathered + self.gradients + self.reduction - self.overlap


def trained_states(shape: ModelShape, work: Workload) -> ModelStates:
    """Return the states of a model that trains.

    Under adapters, the frozen parameters are in compute precision or packed. Only the adapters have masters.
    """
    config, size, trained = work.config, BYTES[work.config.dtype], work.trained(shape)
    largest = unit = max(shape.root_unit, shape.largest_released)
    frozen = 0
    if work.adapters:
        frozen, unit = shape.parameters - work.packed, work.adapters // shape.blocks
    is_offloaded = {config.offload_optimizer, config.offload_parameters} != {"none"}
    states = _stored_states(work, trained, frozen)
    prefetched = 0
    if work.is_single and not is_offloaded and config.states == "fp32" and not averages_itself(work.optimizer):
        gathered, reduction = size * trained if size < 4 else 0, size * unit  # without FSDP2
    else:
        gathered, prefetched = _gathered_bytes(shape, trained + frozen, work)
        reduction = max((size + 4) * unit, 2 * size * largest)
        if is_offloaded and config.zero_stage < 3:  # the peak of stage 3 is in the gathers
            reduction += (4 + size) * unit // work.shards
        if not (is_offloaded or work.accumulates or config.zero_stage == 3):
            # The last micro-batch frees the gathered copy of each block when the block's gradient exists.
            states = replace(states, overlap=min(gathered, states.gradients))
    states = replace(states, gathered=gathered, prefetched=prefetched, reduction=reduction)
    # The memory for gradients of a GPU is pinned, and remains between steps.
    return states if work.is_cpu else replace(states, host_gradients=0)


def checkpoint_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of a model that trains in a checkpoint, over all ranks: masters, moments and average."""
    each = bytes_per_trained_parameter(work.config, work.optimizer, has_average=work.has_average)
    return each * work.trained(shape) * shape.tensor * work.config.pipeline_parallel


def bytes_per_trained_parameter(config: EngineConfig, optimizer: OptimizerConfig, *, has_average: bool) -> int:
    """Return the bytes of a trained parameter in a checkpoint: its master, moments and average."""
    each = 2 if config.states == "bf16" else 4
    return each * (1 + len(moment_names(optimizer))) + 4 * has_average


def model_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of a complete model in compute precision."""
    return BYTES[work.config.dtype] * shape.parameters * shape.tensor


def _stored_states(work: Workload, trained: int, frozen: int) -> ModelStates:
    """Return the states between steps, and the gradients, of `trained` and `frozen` parameters.

    An offloaded optimizer has its states apart from the shards, which are then in compute precision. A share
    `offload_ratio` of these states is on the host or in files. Otherwise the states are next to the shards.
    """
    config, shards, size = work.config, work.shards, BYTES[work.config.dtype]
    is_apart = config.offload_optimizer != "none"
    tier, ratio = (config.offload_optimizer, config.offload_ratio) if is_apart else (config.offload_parameters, 1.0)
    offloaded = 0 if tier == "none" else round(ratio * trained / shards)
    remaining = trained // shards - offloaded
    each = 2 if config.states == "bf16" else 4
    moments: float = each * len(moment_names(work.optimizer))
    if averages_itself(work.optimizer):  # the errors of each rank, and of the share that it sums
        moments += 4 + 4 / work.ranks
    states = each + moments + 4 * work.has_average
    gradient = size if is_apart and not (work.accumulates and config.zero_stage >= 2) else each
    host, nvme = gradient * offloaded, 0
    if gradient < each:  # the step casts the gradients of a sub-group to fp32
        host += 4 * min(offloaded, config.sub_group_size)
    if tier == "nvme":
        nvme += round(states * offloaded)
        host += round(states * min(offloaded, SUB_GROUPS_IN_FLIGHT * config.sub_group_size))
    else:
        host += round(states * offloaded)
    shard = {config.offload_parameters: size * (trained * is_apart + frozen) // shards}
    return ModelStates(
        parameters=shard.get("none", 0) + each * remaining + work.packed_bytes,
        optimizer=round(moments * remaining),
        average=4 * work.has_average * remaining,
        gradients=4 * trained if work.accumulates and config.zero_stage < 2 else gradient * remaining,
        host=host + shard.get("cpu", 0),
        host_gradients=gradient * offloaded,
        nvme=nvme + shard.get("nvme", 0),
    )


def frozen_states(shape: ModelShape, work: Workload) -> ModelStates:
    """Return the states of a model that only scores: parameters in compute precision, gathered while they are used."""
    config, frozen = work.config, shape.parameters - work.packed
    states = _stored_states(work, 0, frozen)
    is_whole = work.is_single or (config.zero_stage == 0 and config.tensor_parallel == 1)
    if is_whole and config.offload_parameters == "none":
        return states
    gathered, prefetched = _gathered_bytes(shape, frozen, work)
    return replace(states, gathered=gathered, prefetched=prefetched)


def _gathered_bytes(shape: ModelShape, parameters: int, work: Workload) -> tuple[int, int]:
    """Return the bytes of gathered copies, and those of the prefetched block among them, which only stage 3 has."""
    size = BYTES[work.config.dtype]
    if work.config.zero_stage < 3:
        return size * parameters, 0
    used = shape.root_unit + shape.largest_released
    gathered = size * min(parameters, used + shape.block)
    if work.config.compress in ("gather8", "both") and work.shards > 1:
        gathered += shape.block + 4 * shape.block // work.shards
    return gathered, size * max(0, min(shape.block, parameters - used))
