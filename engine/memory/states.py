"""Bytes of model states that one rank holds, by ZeRO stage (Rajbhandari et al., 2020, arXiv:1910.02054) and offload.

With P parameters, N shards and d bytes of compute precision, FSDP2 holds:

- fp32 masters 4P/N and Adam moments 8P/N; N = 1 at stage 0,
- gathered copies dP from forward until backward at stages 0 to 2; the root unit and two others at a time at stage 3,
- fp32 gradients 4P at stage 0, and at stage 1 while micro-batches accumulate; otherwise 4P/N,
- during backward, one unit's gradient twice: in compute precision, and in fp32 for the reduction.

One rank without offload uses no FSDP2: copies dP where d < 4, gradients 4P, at every stage.

With an offloaded optimizer the device holds shards of dP/N. The host holds masters, moments and reduced gradients (dP/N
where a step reduces once, otherwise 4P/N). On NVMe masters and moments are in files, and the host buffers
`SUB_GROUPS_IN_FLIGHT` sub-groups of them.
"""

from dataclasses import dataclass, replace

from engine.config import EngineConfig, Precision

Owners = dict[str, int]
BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SUB_GROUPS_IN_FLIGHT = 4


@dataclass(frozen=True)
class ModelStates:
    """Bytes of one model on one rank, at the peak of a step.

    Between steps the device holds `parameters` (masters, or shards in compute precision), `optimizer` (moments) and
    `average`. While the model trains, `gathered` (of it `prefetched` belongs to the next block), `gradients` and
    `reduction` come on top; `overlap` bytes of gathered copies are freed before the last gradients exist. `host`
    includes `host_gradients`; `nvme` is in files.
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


def shard_count(config: EngineConfig, ranks: int) -> int:
    """Return the number of shards of a model's states."""
    return 1 if config.zero_stage == 0 else config.shard_ranks or ranks


def model_states(
    parameters: int,
    *,
    root: int,
    block: int,
    config: EngineConfig,
    ranks: int,
    unit: int | None = None,
    trained: int | None = None,
    accumulates: bool = True,
    moments: int = 2,
    has_average: bool = False,
    has_error_feedback: bool = False,
) -> ModelStates:
    """Return the bytes of a model that trains.

    `root` are the parameters that stage 3 gathers next to a block, `block` those of the largest block, `unit` those of
    the largest FSDP unit (default: of root and block). `trained` parameters learn (default: all), with `moments`
    numbers each. `accumulates` means several micro-batches a step. `has_average` adds a moving average,
    `has_error_feedback` the residuals of 1-bit Adam.
    """
    size, shards, stage = BYTES[config.dtype], shard_count(config, ranks), config.zero_stage
    trained = parameters if trained is None else trained
    gathered, prefetched = _gathered_bytes(parameters, root, block, config)
    unit = max(root, block) if unit is None else unit
    reduction = unit * (size + 4) if trained else 0
    accumulates_full = accumulates and stage < 2
    if config.offload_optimizer != "none":
        states = _offloaded_states(parameters, trained, shards, moments, has_average, config, accumulates)
        gradients = 4 * trained if accumulates_full else states.gradients
        return replace(states, gathered=gathered, prefetched=prefetched, gradients=gradients, reduction=reduction)
    each = 2 if config.states == "bf16" else 4
    error_feedback = 4 * trained + 4 * trained // ranks if has_error_feedback else 0
    states = ModelStates(
        parameters=each * parameters // shards,
        optimizer=each * moments * trained // shards + error_feedback,
        average=each * has_average * trained // shards,
        gathered=gathered,
        prefetched=prefetched,
        gradients=4 * trained if stage == 0 or accumulates_full else each * trained // shards,
        reduction=reduction,
    )
    if config.offload_parameters != "none":  # masters, moments and reduced gradients stay with the shards on the host
        reduced = 4 * trained // shards
        return ModelStates(
            gathered=gathered,
            prefetched=prefetched,
            gradients=states.gradients if stage == 1 else 0,
            reduction=reduction,
            host=states.resting + reduced,
            host_gradients=reduced,
        )
    if _is_plain(config, ranks) and each == 4 and not has_error_feedback:
        copies = size * parameters if size < 4 else 0
        return replace(states, gathered=copies, prefetched=0, reduction=size * unit if trained else 0)
    # The last micro-batch frees the gathered copy of each block when the block's gradient exists.
    is_freed = not accumulates and stage < 3
    return replace(states, overlap=min(gathered, states.gradients) if is_freed else 0)


def _offloaded_states(
    parameters: int, trained: int, shards: int, moments: int, has_average: bool, config: EngineConfig, accumulates: bool
) -> ModelStates:
    """Return the bytes where a share `offload_ratio` of the optimizer states is on the host or in files."""
    size = BYTES[config.dtype]
    offloaded = round(config.offload_ratio * trained / shards)
    remaining = trained // shards - offloaded
    gradient = 4 if accumulates and config.zero_stage >= 2 else size
    states = 4 * (1 + moments + has_average)
    host, nvme = gradient * offloaded, 0
    if gradient < 4:  # the step casts the gradients of a sub-group to fp32
        host += 4 * min(offloaded, config.sub_group_size)
    if config.offload_optimizer == "cpu":
        host += states * offloaded
    else:
        nvme += states * offloaded
        host += states * min(offloaded, SUB_GROUPS_IN_FLIGHT * config.sub_group_size)
    shard = {config.offload_parameters: size * parameters // shards}
    return ModelStates(
        parameters=shard.get("none", 0) + 4 * remaining,
        optimizer=4 * moments * remaining,
        average=4 * has_average * remaining,
        gradients=gradient * remaining,
        host=host + shard.get("cpu", 0),
        host_gradients=gradient * offloaded,
        nvme=nvme + shard.get("nvme", 0),
    )


def frozen_states(parameters: int, *, root: int, block: int, config: EngineConfig, ranks: int) -> ModelStates:
    """Return the bytes of a model that only scores: parameters in compute precision, gathered while they are used."""
    shard = {config.offload_parameters: BYTES[config.dtype] * parameters // shard_count(config, ranks)}
    gathered, prefetched = _gathered_bytes(parameters, root, block, config)
    is_copied = not _is_plain(config, ranks) or config.offload_parameters != "none"
    return ModelStates(
        parameters=shard.get("none", 0),
        gathered=gathered if is_copied else 0,
        prefetched=prefetched if is_copied else 0,
        host=shard.get("cpu", 0),
        nvme=shard.get("nvme", 0),
    )


def _gathered_bytes(parameters: int, root: int, block: int, config: EngineConfig) -> tuple[int, int]:
    """Return the bytes of gathered copies, and those of the prefetched block, which only stage 3 has."""
    size = BYTES[config.dtype]
    if config.zero_stage < 3:
        return size * parameters, 0
    return size * min(parameters, root + 2 * block), size * max(0, min(block, parameters - root - block))


def _is_plain(config: EngineConfig, ranks: int) -> bool:
    """Return whether the module stays as it is, without FSDP2."""
    return ranks == 1 and config.tensor_parallel == 1
