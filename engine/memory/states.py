"""Bytes of model states that a rank holds under our engine, by ZeRO stage.

What FSDP2 keeps, with P parameters, N ranks a copy, d bytes of compute precision (measured, and tested, against the
tensors that live): fp32 masters 4P/N and Adam 8P/N always; at stages 0 to 2 gathered copies of dP from forward until
backward has used them; fp32 gradients, whole (4P) at stage 0, and at stage 1 while micro-batches accumulate, else 4P/N.
Stage 0 has N = 1. Stage 3 gathers the root (embeddings and head) for the whole pass, and two blocks at a time. A unit
in backward has its gradient twice more: in compute precision, and in fp32 on its way to the others.
"""

from dataclasses import dataclass

from engine.config import Precision

SIZE: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class ModelStates:
    """Bytes a rank. `resting` is held all the time, the others while it trains or scores."""

    masters: int
    moments: int
    gathered: int
    gradients: int
    passing: int
    host: int = 0

    @property
    def resting(self) -> int:
        """Between steps, on the device."""
        return self.masters + self.moments

    @property
    def working(self) -> int:
        """What comes on top within a step, at its height."""
        return self.gathered + self.gradients + self.passing

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
    offload: bool = False,
) -> ModelStates:
    """States of a model that is trained; `trained` parameters of it (None: all), `moments` fp32 values a parameter.

    `root` and `block` are parameters of FSDP units: outside of the blocks, and of the largest block. `accumulates` says
    that a step has several micro-batches.
    With `offload` the shards are on the host.
    """
    size, shards = SIZE[dtype], 1 if stage == 0 else ranks
    learning = parameters if trained is None else trained
    whole_gradients = stage == 0 or (stage == 1 and accumulates)
    gradients = 4 * learning if whole_gradients else 4 * learning // shards
    gathered = size * (min(parameters, root + 2 * block) if stage == 3 else parameters)
    if not accumulates and stage < 3:
        # A lone micro-batch frees the gathered copy of a block as its gradient comes.
        gathered, gradients = max(gathered, gradients), 0
    held = (4 * parameters // shards, 4 * moments * learning // shards)
    passing = max(root, block) * (size + 4) if learning else 0
    if offload:
        host = sum(held) + 4 * learning // shards
        return ModelStates(0, 0, gathered, gradients if whole_gradients and stage == 1 else 0, passing, host)
    return ModelStates(*held, gathered, gradients, passing)


def frozen_states(
    parameters: int,
    *,
    root: int,
    block: int,
    stage: int,
    ranks: int,
    dtype: Precision = "bf16",
    offload: bool = False,
) -> ModelStates:
    """States of a model that only computes: parameters in compute precision, gathered while they are used."""
    size, shards = SIZE[dtype], 1 if stage == 0 else ranks
    held = size * parameters // shards
    gathered = size * (min(parameters, root + 2 * block) if stage == 3 else parameters)
    return ModelStates(0 if offload else held, 0, gathered, 0, 0, held if offload else 0)
