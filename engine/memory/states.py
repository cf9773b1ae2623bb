"""Bytes of model states that a rank holds under our engine, by ZeRO stage and offload tier.

What FSDP2 keeps, with P parameters, N ranks a copy, d bytes of compute precision (measured, and tested, against the
tensors that live): fp32 masters 4P/N and Adam 8P/N always; at stages 0 to 2 gathered copies of dP from forward until
backward has used them; fp32 gradients, whole (4P) at stage 0, and at stage 1 while micro-batches accumulate, else 4P/N.
Stage 0 has N = 1. Stage 3 gathers the root (embeddings and head) for the whole pass, and two blocks at a time. A unit
in backward has its gradient twice more: in compute precision, and in fp32 on its way to the others. One rank by itself
goes without FSDP2 unless it offloads: copies of dP where d < 4, gradients of 4P, at every stage.

With an offloaded optimizer the device holds shards in compute precision, dP/N; masters, moments and the step's reduced
gradients are on the host (dP/N where a step reduces once: stages 0 and 1, or a lone micro-batch; else 4P/N). On NVMe
masters and moments are in files, and the host has `SUB_GROUPS_IN_FLIGHT` sub-groups of them beside the gradients.
"""

from dataclasses import dataclass

from engine.config import EngineConfig, Precision, Tier

SIZE: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
SUB_GROUPS_IN_FLIGHT = 4


@dataclass(frozen=True)
class ModelStates:
    """Bytes a rank. `resting` is held all the time, the others while it trains or scores.

    Those are on the device; `host` and `nvme` are the most that a step holds there.
    """

    masters: int
    moments: int
    gathered: int
    gradients: int
    passing: int
    host: int = 0
    parameters: int = 0
    nvme: int = 0
    host_gradients: int = 0  # the part of `host` that a step's gradients take
    average: int = 0
    scoring: int = 0  # gathered copies while no gradients are wanted
    overlap: int = 0  # gathered copies that are gone before all gradients are there
    ahead: int = 0  # the part of `gathered` and `scoring` that is the next block's

    @property
    def resting(self) -> int:
        """Between steps, on the device."""
        return self.parameters + self.masters + self.moments + self.average

    @property
    def working(self) -> int:
        """What comes on top within a step, at its height."""
        return self.gathered + self.gradients + self.passing - self.overlap

    @property
    def peak(self) -> int:
        """On the device at the height of a step."""
        return self.resting + self.working


def model_states(
    parameters: int,
    *,
    root: int,
    block: int,
    stage: int,
    ranks: int,
    dtype: Precision = "bf16",
    trained: int | None = None,
    accumulates: bool = True,
    moments: int = 2,
    offload_optimizer: Tier = "none",
    offload_parameters: Tier = "none",
    ratio: float = 1.0,
    sub_group: int = EngineConfig.sub_group_size,
    lean: bool = False,
    errors: bool = False,
    shards: int | None = None,
    averages: bool = False,
    alone: bool | None = None,
) -> ModelStates:
    """States of a model that is trained; `trained` parameters of it (None: all), `moments` fp32 values a parameter.

    `shards` are the parts that states are in (None: as many as `ranks`); `averages` keeps a mean of what is trained.
    `alone` says that there is no other rank (None: where `ranks` is 1), not even in a tensor group.
    `root` and `block` are parameters of FSDP units: outside of the blocks, and of the largest block. `accumulates` says
    that a step has several micro-batches. `ratio` is the share of them whose optimizer is offloaded. `lean` states are
    bf16 parameters (here masters) and moments; `errors` are what 1-bit Adam keeps of what it did not send.
    """
    size, shards = SIZE[dtype], 1 if stage == 0 else shards or ranks
    learning = parameters if trained is None else trained
    each = 2 if lean else 4
    whole_gradients = stage == 0 or (stage == 1 and accumulates)
    gradients = 4 * learning if whole_gradients else each * learning // shards
    gathered, ahead = _gathered(parameters, root, block, stage, size)
    scoring, overlap = gathered, 0
    if not accumulates and stage < 3:
        # A lone micro-batch frees the gathered copy of a block as its gradient comes.
        overlap = min(gathered, gradients)
    held = (each * parameters // shards, each * moments * learning // shards)
    if errors:
        held = (held[0], held[1] + 4 * learning + 4 * learning // ranks)
    passing = max(root, block) * (size + 4) if learning else 0
    mean = averages * each * learning // shards
    on_device = offload_optimizer == offload_parameters == "none"
    if (ranks == 1 if alone is None else alone) and on_device and not (lean or errors):
        copies = size * parameters if size < 4 else 0  # engine/parallel/alone.py, at every stage
        passing = size * max(root, block) if learning else 0
        return ModelStates(*held, copies, 4 * learning, passing, average=mean, scoring=copies)
    if offload_optimizer == "none":
        if offload_parameters == "none":
            return ModelStates(
                *held, gathered, gradients, passing, average=mean, scoring=scoring, ahead=ahead, overlap=overlap
            )
        reduced = 4 * learning // shards
        return ModelStates(
            0,
            0,
            gathered,
            gradients if stage == 1 else 0,
            passing,
            sum(held) + mean + reduced,
            host_gradients=reduced,
            scoring=scoring,
            ahead=ahead,
        )
    away = ratio * learning / shards
    states = 4 * (1 + moments + averages)
    reduced = 4 if accumulates and stage >= 2 else size
    on_host, on_nvme = reduced * away, 0.0
    if reduced < 4 and moments != 2:  # Adam takes 16-bit gradients as they are (engine/offload/adam.py)
        on_host += 4 * min(away, sub_group)  # others get them in fp32, a sub-group at a time
    if offload_optimizer == "cpu":
        on_host += states * away
    else:
        on_nvme = states * away
        on_host += states * min(away, SUB_GROUPS_IN_FLIGHT * sub_group)
    here = learning / shards - away
    shard = size * parameters / shards
    waiting = 4 * learning if accumulates and stage < 2 else reduced * here
    return ModelStates(
        masters=round(4 * here),
        moments=round(4 * moments * here),
        gathered=gathered,
        gradients=round(waiting),
        passing=passing,
        host=round(on_host + (shard if offload_parameters == "cpu" else 0)),
        parameters=round(shard if offload_parameters == "none" else 0),
        nvme=round(on_nvme + (shard if offload_parameters == "nvme" else 0)),
        host_gradients=round(reduced * away),
        average=round(4 * averages * here),
        scoring=scoring,
        ahead=ahead,
    )


def frozen_states(
    parameters: int,
    *,
    root: int,
    block: int,
    stage: int,
    ranks: int,
    dtype: Precision = "bf16",
    offload_parameters: Tier = "none",
    shards: int | None = None,
    alone: bool | None = None,
) -> ModelStates:
    """States of a model that only computes: parameters in compute precision, gathered while they are used."""
    size, shards = SIZE[dtype], 1 if stage == 0 else shards or ranks
    held = size * parameters // shards
    gathered, ahead = _gathered(parameters, root, block, stage, size)
    if (ranks == 1 if alone is None else alone) and offload_parameters == "none":
        gathered = ahead = 0
    return ModelStates(
        0,
        0,
        gathered,
        0,
        0,
        scoring=gathered,
        ahead=ahead,
        parameters=held if offload_parameters == "none" else 0,
        host=held if offload_parameters == "cpu" else 0,
        nvme=held if offload_parameters == "nvme" else 0,
    )


def _gathered(parameters: int, root: int, block: int, stage: int, size: int) -> tuple[int, int]:
    """Bytes of gathered copies, and of them those of the block that comes next."""
    if stage < 3:
        return size * parameters, 0
    return size * min(parameters, root + 2 * block), size * max(0, min(block, parameters - root - block))
