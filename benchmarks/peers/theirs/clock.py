"""When the steps of transformers' trainers end, which TRL's are made on."""

import time
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):
    """A callback for a trainer; `seconds` when it is done."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ends.append(time.perf_counter())

    def seconds(self, warmup: int) -> list[float]:
        """Of each step after the first `warmup` (at least 1: when the first began is not known)."""
        each = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        return each[warmup - 1 :]
