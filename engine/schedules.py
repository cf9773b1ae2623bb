"""DeepSpeed's learning-rate schedules, with its formulas and parameter names (deepspeed/runtime/lr_schedules.py).

The fields of a class are the parameters of the schedule. `lr(step)` returns the learning rate of a step.

`step` counts from 0. DeepSpeed advances its schedules after a step. Its "iteration" is therefore `step - 1`, and the
first step runs at the smallest rate.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

Warmup = Literal["log", "linear"]


@dataclass(frozen=True, kw_only=True)
class WarmupLR:
    """Rise to `warmup_max_lr` and stay there."""

    warmup_max_lr: float
    warmup_min_lr: float = 0.0
    warmup_num_steps: int = 1000
    warmup_type: Warmup = "log"

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * self._share(step - 1)

    def _share(self, iteration: int) -> float:
        return _warmup_share(iteration, self.warmup_num_steps, self.warmup_type)


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """Rise to `warmup_max_lr`, then fall linearly to `warmup_min_lr` at `total_num_steps`."""

    total_num_steps: int
    warmup_max_lr: float = 1e-3

    def _share(self, iteration: int) -> float:
        warmup = max(2, self.warmup_num_steps)
        if iteration < warmup:
            return super()._share(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - warmup))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR:
    """Rise to the optimizer's rate `optimizer_lr`, then fall along a cosine. The first step has rate 0."""

    optimizer_lr: float
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 1e-4
    warmup_type: Warmup = "log"

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        iteration, warmup = step - 1, max(2, self.warmup_num_steps)
        if iteration < 0:
            return 0.0
        if iteration < warmup:
            share = _warmup_share(iteration, warmup, self.warmup_type)
            return self.optimizer_lr * (self.warmup_min_ratio + (1 - self.warmup_min_ratio) * share)
        done = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        ratio = self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2
        return self.optimizer_lr * max(0.0, ratio)


def _warmup_share(iteration: int, warmup_num_steps: int, warmup_type: Warmup) -> float:
    """Return the completed share of the warm-up, from 0 to 1; logarithmic: ln(iteration + 1) / ln(warm-up steps)."""
    steps = max(2, warmup_num_steps)
    if iteration < 0 or iteration >= steps:
        return float(iteration >= steps)
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps


SCHEDULES: dict[str, Any] = {schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
