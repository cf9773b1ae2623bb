"""Learning rates by optimizer step, with DeepSpeed's formulas and parameter names (deepspeed/runtime/lr_schedules.py).

`step` counts from 0. DeepSpeed advances its schedules after a step. Its "iteration" is therefore `step - 1`, and the
first step runs at the smallest rate. Warm-ups are logarithmic by default: ln(iteration + 1) / ln(warm-up steps).
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Warmup = Literal["log", "linear"]


def warmup_lr(
    step: int,
    *,
    warmup_max_lr: float,
    warmup_min_lr: float = 0.0,
    warmup_num_steps: int = 1000,
    warmup_type: Warmup = "log",
) -> float:
    """Return WarmupLR's rate: it rises to `warmup_max_lr` and stays there."""
    iteration = step - 1
    if iteration < 0:
        return warmup_min_lr
    share = _warmup_share(iteration, warmup_num_steps, warmup_type) if iteration < max(2, warmup_num_steps) else 1.0
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def warmup_decay_lr(
    step: int,
    *,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: Warmup = "log",
) -> float:
    """Return WarmupDecayLR's rate: it rises, then falls linearly to `warmup_min_lr` at `total_num_steps`."""
    iteration, warmup = step - 1, max(2, warmup_num_steps)
    if iteration < warmup:
        return warmup_lr(
            step,
            warmup_max_lr=warmup_max_lr,
            warmup_min_lr=warmup_min_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
        )
    share = max(0.0, (total_num_steps - iteration) / max(1.0, total_num_steps - warmup))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def warmup_cosine_lr(
    step: int,
    *,
    lr: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    warmup_type: Warmup = "log",
) -> float:
    """Return WarmupCosineLR's rate: ratios of the optimizer's rate `lr`. The first step has rate 0."""
    iteration, warmup = step - 1, max(2, warmup_num_steps)
    if iteration < 0:
        return 0.0
    if iteration < warmup:
        share = _warmup_share(iteration, warmup_num_steps, warmup_type)
        return lr * (warmup_min_ratio + (1 - warmup_min_ratio) * share)
    done = min(1.0, (iteration - warmup + 1) / max(1, total_num_steps - warmup))
    return lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


def range_test_lr(
    step: int,
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> float:
    """Return LRRangeTest's rate, which grows without limit (Smith, 2015, arXiv:1506.01186)."""
    interval = step / lr_range_test_step_size
    steps = math.floor(interval) if lr_range_test_staircase else interval
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * steps)


def one_cycle_lr(
    step: int,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> float:
    """Return OneCycle's rate: up, down, then `cycle_min_lr` divided by 1 + decay_lr_rate per decay step.

    Source: Smith, 2018, arXiv:1803.09820.
    """
    after = _steps_after_cycle(step, cycle_first_step_size, cycle_second_step_size)
    if after is None:
        share = _cycle_share(
            step, cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
        )
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * share
    return cycle_min_lr / (1 + decay_lr_rate * after / decay_step_size) if decay_step_size else cycle_min_lr


def one_cycle_betas(
    step: int,
    *,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> tuple[float, float]:
    """Return OneCycle's betas. The first falls while the rate rises; the second is 0.99."""
    if step == 0:
        return cycle_min_mom, 0.99
    after = _steps_after_cycle(step, cycle_first_step_size, cycle_second_step_size)
    if after is None:
        share = _cycle_share(
            step, cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
        )
        return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * share, 0.99
    return cycle_max_mom * (1 + decay_mom_rate * after / decay_step_size if decay_step_size else 1.0), 0.99


@dataclass(frozen=True)
class Scheduler:
    """A schedule that DeepSpeed names: its rate and, if it cycles the momentum, its betas, as functions of the step."""

    lr: Callable[..., float]
    betas: Callable[..., tuple[float, float]] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters with their defaults; None if a parameter has no default."""
        switch = {"cycle_momentum": True} if self.betas is not None else {}
        found = parameters_of(self.lr) | switch | (parameters_of(self.betas) if self.betas is not None else {})
        return {name: default for name, default in found.items() if name != "lr"}


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword parameters of a schedule with their defaults."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


SCHEDULERS = {
    "WarmupLR": Scheduler(warmup_lr),
    "WarmupDecayLR": Scheduler(warmup_decay_lr),
    "WarmupCosineLR": Scheduler(warmup_cosine_lr),
    "OneCycle": Scheduler(one_cycle_lr, one_cycle_betas),
    "LRRangeTest": Scheduler(range_test_lr),
}


def _warmup_share(iteration: int, warmup_num_steps: int, warmup_type: Warmup) -> float:
    """Return the completed share of the warm-up (0 to 1) at one of its iterations."""
    steps = max(2, warmup_num_steps)
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps


def _cycle_share(step: int, rise: int, fall: int | None, rise_stairs: int, fall_stairs: int | None) -> float:
    """Return the height of the cycle at a step: 0 at its ends, 1 at its top, in stairs if their number is not 0."""
    fall = rise if fall is None else fall
    position = step % (rise + fall)
    is_rising = position <= rise
    stairs = rise_stairs if is_rising or fall_stairs is None else fall_stairs
    count, length = (position, rise) if is_rising else (rise + fall - position, fall)
    return math.floor(count * stairs / length) / stairs if stairs else count / length


def _steps_after_cycle(step: int, rise: int, fall: int | None) -> int | None:
    """Return the number of steps since the end of the cycle; None inside it. Its last iteration starts it again."""
    total = rise + (rise if fall is None else fall)
    return None if step - 1 < total else step - total
