"""Bytes of model states that one rank holds, by ZeRO stage (Rajbhandari et al., 2020, arXiv:1910.02054) and offload.

With P parameters, N shards and d bytes of compute precision, FSDP2 holds:

- fp32 masters 4P/N and Adam moments 8P/N; N = 1 at stage 0,
- gathered copies dP from forward until backward at stages 0 to 2; the root and two blocks at a time at stage 3,
- fp32 gradients 4P at stage 0, and at stage 1 while micro-batches accumulate; otherwise 4P/N,
- during backward, one unit's gradient twice: in compute precision, and in fp32 for the reduction.

One rank without offload uses no FSDP2: copies dP where d < 4, gradients 4P, at every stage.

With an offloaded optimizer the device holds shards of dP/N. The host holds masters, moments and reduced gradients (dP/N
where a step reduces once, otherwise 4P/N). On NVMe masters and moments are in files, and the host buffers
`SUB_GROUPS_IN_FLIGHT` sub-groups of them.
"""

from dataclasses import dataclass

from engine.config import EngineConfig, Precision

BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SUB_GROUPS_IN_FLIGHT = 4


@dataclass(frozen=True)
class ModelStates:
    """Bytes of one model on one rank, at the peak of a step.

    On the device: `parameters` (shards in compute precision), `masters`, `moments`, `average` all the time; `gathered`
    (of it `prefetched` belongs to the next block), `gradients` and `reduction` while the model trains. `overlap` bytes
    of gathered copies are freed before the last gradients exist. `host` includes `host_gradients`; `nvme` is in files.
    """

    parameters: int = 0
    masters: int = 0
    moments: int = 0
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
        return self.parameters + self.masters + self.moments + self.average

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
    trained: int | None = None,
    accumulates: bool = True,
    moments: int = 2,
    has_average: bool = False,
    has_error_feedback: bool = False,
    is_single_rank: bool | None = None,
) -> ModelStates:
    """Return the bytes of a model that trains.

    `root` and `block` are the parameters outside of the blocks, and of the largest block. `trained` parameters learn
    (default: all), with `moments` numbers each. `accumulates` means several micro-batches a step. `has_average` adds a
    moving average, `has_error_feedback` the residuals of 1-bit Adam. `is_single_rank` is False inside tensor groups.
    """
    size, shards = BYTES[config.dtype], shard_count(config, ranks)
    stage, on_device = config.zero_stage, config.offload_optimizer == config.offload_parameters == "none"
    trained = parameters if trained is None else trained
    each = 2 if config.states == "bf16" else 4
    gathered, prefetched = _gathered(parameters, root, block, stage, size)
    accumulates_full = stage == 0 or (stage == 1 and accumulates)
    gradients = 4 * trained if accumulates_full else each * trained // shards
    reduction = max(root, block) * (size + 4) if trained else 0
    masters = each * parameters // shards
    first_moments = each * moments * trained // shards
    if has_error_feedback:
        first_moments += 4 * trained + 4 * trained // ranks
    average = has_average * each * trained // shards
    is_single_rank = ranks == 1 if is_single_rank is None else is_single_rank
    if is_single_rank and on_device and each == 4 and not has_error_feedback:
        return ModelStates(
            masters=masters,
            moments=first_moments,
            average=average,
            gathered=size * parameters if size < 4 else 0,
            gradients=4 * trained,
            reduction=size * max(root, block) if trained else 0,
        )
    if config.offload_optimizer != "none":
        return _with_offloaded_optimizer(
            config,
            ModelStates(gathered=gathered, prefetched=prefetched, reduction=reduction),
            parameters=parameters,
            trained=trained,
            shards=shards,
            moments=moments,
            accumulates=accumulates,
            has_average=has_average,
        )
    if config.offload_parameters != "none":  # masters, moments and reduced gradients stay with the shards on the host
        reduced = 4 * trained // shards
        return ModelStates(
            gathered=gathered,
            prefetched=prefetched,
            gradients=gradients if stage == 1 else 0,
            reduction=reduction,
            host=masters + first_moments + average + reduced,
            host_gradients=reduced,
        )
    return ModelStates(
        masters=masters,
        moments=first_moments,
        average=average,
        gathered=gathered,
        prefetched=prefetched,
        gradients=gradients,
        reduction=reduction,
        # The last micro-batch frees the gathered copy of each block when the block's gradient exists.
        overlap=min(gathered, gradients) if not accumulates and stage < 3 else 0,
    )


def _with_offloaded_optimizer(
    config: EngineConfig,
    passing: ModelStates,
    *,
    parameters: int,
    trained: int,
    shards: int,
    moments: int,
    accumulates: bool,
    has_average: bool,
) -> ModelStates:
    """Return the bytes where a share `offload_ratio` of the optimizer states is on the host or in files."""
    size = BYTES[config.dtype]
    offloaded = config.offload_ratio * trained / shards
    remaining = trained / shards - offloaded
    states = 4 * (1 + moments + has_average)
    gradient = 4 if accumulates and config.zero_stage >= 2 else size
    host, nvme = gradient * offloaded, 0.0
    if gradient < 4 and moments != 2:  # Adam reads 16-bit gradients; other optimizers get an fp32 copy of a sub-group
        host += 4 * min(offloaded, config.sub_group_size)
    if config.offload_optimizer == "cpu":
        host += states * offloaded
    else:
        nvme += states * offloaded
        host += states * min(offloaded, SUB_GROUPS_IN_FLIGHT * config.sub_group_size)
    shard = {config.offload_parameters: size * parameters / shards}
    return ModelStates(
        parameters=round(shard.get("none", 0)),
        masters=round(4 * remaining),
        moments=round(4 * moments * remaining),
        average=round(4 * has_average * remaining),
        gathered=passing.gathered,
        prefetched=passing.prefetched,
        gradients=round(4 * trained if accumulates and config.zero_stage < 2 else gradient * remaining),
        reduction=passing.reduction,
        host=round(host + shard.get("cpu", 0)),
        host_gradients=round(gradient * offloaded),
        nvme=round(nvme + shard.get("nvme", 0)),
    )


def frozen_states(
    parameters: int, *, root: int, block: int, config: EngineConfig, ranks: int, is_single_rank: bool | None = None
) -> ModelStates:
    """Return the bytes of a model that only scores: parameters in compute precision, gathered while they are used."""
    size = BYTES[config.dtype]
    shard = {config.offload_parameters: size * parameters // shard_count(config, ranks)}
    gathered, prefetched = _gathered(parameters, root, block, config.zero_stage, size)
    if (ranks == 1 if is_single_rank is None else is_single_rank) and "none" in shard:
        gathered = prefetched = 0
    return ModelStates(
        parameters=shard.get("none", 0),
        gathered=gathered,
        prefetched=prefetched,
        host=shard.get("cpu", 0),
        nvme=shard.get("nvme", 0),
    )


def _gathered(parameters: int, root: int, block: int, stage: int, size: int) -> tuple[int, int]:
    """Return the bytes of gathered copies, and the bytes among them of the prefetched block."""
    if stage < 3:
        return size * parameters, 0
    return size * min(parameters, root + 2 * block), size * max(0, min(block, parameters - root - block))
