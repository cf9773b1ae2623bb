"""Learning rates by optimizer step, with DeepSpeed's formulas (deepspeed/runtime/lr_schedules.py).

`step` counts from 0. DeepSpeed advances its schedules after a step, so that its "iteration" is `step - 1`, and the very
first step runs at the smallest rate. Warm-ups are logarithmic there unless told otherwise: ln(iteration + 1) /
ln(warmup steps).
"""

import math
from typing import Literal

Warmup = Literal["log", "linear"]


def warmup_share(iteration: int, warmup_steps: int, kind: Warmup) -> float:
    """How far the warm-up has come, 0 to 1, for an iteration within it."""
    steps = max(2, warmup_steps)
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def warmup_lr(
    step: int, *, maximum: float, minimum: float = 0.0, warmup_steps: int = 1000, kind: Warmup = "log"
) -> float:
    """WarmupLR: rises to `maximum` and stays."""
    iteration = step - 1
    if iteration < 0:
        return minimum
    share = warmup_share(iteration, warmup_steps, kind) if iteration < max(2, warmup_steps) else 1.0
    return minimum + (maximum - minimum) * share


def warmup_decay_lr(
    step: int,
    *,
    total_steps: int,
    maximum: float = 1e-3,
    minimum: float = 0.0,
    warmup_steps: int = 1000,
    kind: Warmup = "log",
) -> float:
    """WarmupDecayLR: rises to `maximum`, then falls in a straight line to `minimum` at `total_steps`."""
    iteration, warmup = step - 1, max(2, warmup_steps)
    if iteration < warmup:
        return warmup_lr(step, maximum=maximum, minimum=minimum, warmup_steps=warmup_steps, kind=kind)
    share = max(0.0, (total_steps - iteration) / max(1.0, total_steps - warmup))
    return minimum + (maximum - minimum) * share


def warmup_cosine_lr(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 1000,
    minimum_ratio: float = 0.0,
    final_ratio: float = 1e-4,
    kind: Warmup = "log",
) -> float:
    """WarmupCosineLR: ratios of the optimizer's own rate `peak`; the very first step is 0, whatever `minimum_ratio`."""
    iteration, warmup = step - 1, max(2, warmup_steps)
    if iteration < 0:
        return 0.0
    if iteration < warmup:
        return peak * (minimum_ratio + (1 - minimum_ratio) * warmup_share(iteration, warmup_steps, kind))
    done = min(1.0, (iteration - warmup + 1) / max(1, total_steps - warmup))
    return peak * max(0.0, final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * done)) / 2)


def range_test_lr(
    step: int, *, minimum: float = 1e-3, step_size: int = 2000, rate: float = 1.0, staircase: bool = False
) -> float:
    """LRRangeTest (Smith, 2015, arXiv:1506.01186): grows without end, by `rate` times the start every `step_size`."""
    interval = step / step_size
    return minimum * (1 + rate * (math.floor(interval) if staircase else interval))


def cycle_share(
    step: int, *, first: int = 2000, second: int | None = None, first_stairs: int = 0, second_stairs: int | None = None
) -> float:
    """OneCycle: the height of the cycle at a step, 0 at its ends and 1 at its top, in stairs where told."""
    fall = first if second is None else second
    place = step % (first + fall)
    rising = place <= first
    share = place / first if rising else (first + fall - place) / fall
    stairs = first_stairs if rising or second_stairs is None else second_stairs
    if not stairs:
        return share
    exact = place * stairs / first if rising else (first + fall - place) * stairs / fall
    return math.floor(exact) / stairs


def one_cycle_lr(
    step: int,
    *,
    minimum: float,
    maximum: float,
    first: int = 2000,
    second: int | None = None,
    first_stairs: int = 0,
    second_stairs: int | None = None,
    decay_rate: float = 0.0,
    decay_step_size: int = 0,
) -> float:
    """OneCycle (Smith, 2018, arXiv:1803.09820): up, down, then `minimum` divided by 1 + decay_rate per decay step."""
    over = _after_cycle(step, first, second)
    if over is None:
        share = cycle_share(step, first=first, second=second, first_stairs=first_stairs, second_stairs=second_stairs)
        return minimum + (maximum - minimum) * share
    return minimum / (1 + decay_rate * over / decay_step_size) if decay_step_size and decay_rate else minimum


def one_cycle_betas(
    step: int,
    *,
    minimum: float = 0.8,
    maximum: float = 0.9,
    first: int = 2000,
    second: int | None = None,
    first_stairs: int = 0,
    second_stairs: int | None = None,
    decay_rate: float = 0.0,
    decay_step_size: int = 0,
) -> tuple[float, float]:
    """OneCycle's betas: the first falls where the rate rises, the second is 0.99. The very first step has `minimum`."""
    if step == 0:
        return minimum, 0.99
    over = _after_cycle(step, first, second)
    if over is None:
        share = cycle_share(step, first=first, second=second, first_stairs=first_stairs, second_stairs=second_stairs)
        return maximum - (maximum - minimum) * share, 0.99
    return maximum * (1 + decay_rate * over / decay_step_size if decay_step_size and decay_rate else 1.0), 0.99


def _after_cycle(step: int, first: int, second: int | None) -> int | None:
    """How many steps lie behind the cycle; None within it. Its last iteration belongs to it and begins it anew."""
    total = first + (first if second is None else second)
    return None if step - 1 < total else step - total
