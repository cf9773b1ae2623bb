"""Seconds of the steps of transformers' trainers, which TRL's trainers extend."""

import time
from typing import Any

from transformers import TrainerCallback


class StepTimes(TrainerCallback):
    """A callback that records the time at which each step ends."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ends.append(time.perf_counter())

    def seconds(self, warmup: int) -> list[float]:
        """Return the seconds of each step after the first `warmup` (at least 1: the first step has no start time)."""
        durations = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        return durations[warmup - 1 :]
