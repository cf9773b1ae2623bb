"""The settings that the planner chooses from, from the fastest to the leanest, and what each needs and takes.

On a CPU host memory is the device's, so that moving states there gains nothing: only the tiers on disk are left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from engine.memory import Demand, Workload

HEADROOM = 0.92  # share of what is there that a prediction may fill: the rest is fragmentation and the library's own


@dataclass(frozen=True)
class Room:
    """Bytes that a rank may have: on its device, of the host's memory, of the disk. On CPUs device is the host."""

    device: int
    host: int
    disk: int
    on_gpu: bool

    def holds(self, demand: Demand) -> bool:
        """Whether a prediction fits."""
        here = demand.peak if self.on_gpu else demand.peak + demand.host
        there = demand.host if self.on_gpu else 0
        return here <= HEADROOM * self.device and there <= HEADROOM * self.host and demand.nvme <= HEADROOM * self.disk


@dataclass(frozen=True)
class Setting:
    """Keys of `engine`, and tokens a micro-batch."""

    engine: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0

    def words(self, stage: str, work: Workload) -> str:
        """What is other than in `work`, as it is given on the command line."""
        now = {
            "zero_stage": work.stage,
            "offload_optimizer": work.offload_optimizer,
            "offload_parameters": work.offload_parameters,
            "activation_checkpointing": work.checkpointing,
        }
        parts = [f"engine.{key}={str(value).lower()}" for key, value in self.engine.items() if value != now[key]]
        if self.tokens != work.micro_batch_tokens:
            parts.append(f"{stage}.micro_batch_tokens={self.tokens}")
        return " ".join(parts) or "as it is configured"

    def of(self, work: Workload) -> Workload:
        """The work under this setting."""
        return replace(
            work,
            stage=self.engine["zero_stage"],
            checkpointing=self.engine["activation_checkpointing"],
            offload_optimizer=self.engine["offload_optimizer"],
            offload_parameters=self.engine["offload_parameters"],
            micro_batch_tokens=self.tokens,
        )


def ladder(work: Workload, room: Room) -> Iterator[Setting]:
    """Every setting, each with the micro-batch as configured and halved down to one sequence, or one pair."""
    for engine in _layouts(work.ranks, on_gpu=room.on_gpu, whole=work.pieces > 1):
        if work.states == "bf16" and engine["offload_optimizer"] != "none":
            continue  # these can't be offloaded
        tokens = work.micro_batch_tokens
        yield Setting(engine, tokens)
        while tokens > work.least_tokens:
            tokens = max(work.least_tokens, tokens // 2)
            yield Setting(engine, tokens)


def _layouts(ranks: int, *, on_gpu: bool, whole: bool) -> Iterator[dict[str, Any]]:
    """`whole` says that parameters have to be whole where they compute, and on the device: those of a pipeline."""
    shared = ((0, 1, 2) if whole else (0, 1, 2, 3)) if ranks > 1 else (0,)
    for stage in shared:
        yield _layout(stage)
    for stage in shared[-2:]:
        yield _layout(stage, recompute=True)
    if whole:
        return
    for tier in ("cpu", "nvme") if on_gpu else ("nvme",):
        stage = 2 if ranks > 1 else 0
        yield _layout(stage, optimizer=tier)
        yield _layout(stage, optimizer=tier, recompute=True)
        yield _layout(3, optimizer=tier, parameters=tier, recompute=True)


def _layout(
    stage: int, *, optimizer: str = "none", parameters: str = "none", recompute: bool = False
) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "offload_optimizer": optimizer,
        "offload_parameters": parameters,
        "activation_checkpointing": recompute,
    }
