"""Format numbers for readers, and compute chart axes: round ticks, ranges, and pixel positions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MINUS = "\u2212"
LARGEST = 1e300  # Differences of larger values overflow, so charts treat them as infinite.


def format_number(value: float, digits: int = 3) -> str:
    """Format `value` with about `digits` significant digits. Long numbers get k, M, G or a power of ten."""
    sign, size = (MINUS if value < 0 else ""), abs(value)
    if size == 0:
        return "0"
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (1e-3, 1.0, "")):
        if limit <= size < 1e12:
            decimals = max(0, digits - 1 - math.floor(math.log10(size / divisor)))
            return f"{sign}{size / divisor:.{decimals}f}{letter}"
    return f"{sign}{size:.2g}"


def format_signed(value: float, decimals: int = 2) -> str:
    """Format a difference, always with its sign."""
    shown = f"{abs(value):.{decimals}f}"
    if float(shown) == 0:
        return shown
    return f"{MINUS if value < 0 else '+'}{shown}"


def format_interval(low: float, high: float) -> str:
    """Format the 95% interval of a difference, with enough decimals to show the sign of both ends.

    The interval of one value is unknown; its ends are nan.
    """
    if math.isnan(low):
        return "unknown"
    nearest = min(abs(low), abs(high))
    decimals = 2
    if low * high > 0:
        while decimals < 6 and float(f"{nearest:.{decimals}f}") == 0:
            decimals += 1
    return f"{format_signed(low, decimals)} to {format_signed(high, decimals)}"


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high` with `ticks` between them."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def pixel(self, value: float, start: float, end: float) -> float:
        """Return the pixel of `value` if `low` is at `start` and `high` at `end`. Clamp values outside the axis."""
        share = (value - self.low) / (self.high - self.low)
        return round(start + min(max(share, 0.0), 1.0) * (end - start), 1)

    def labels(self) -> list[str]:
        """Format the ticks, all with the same number of decimals."""
        largest = max((abs(tick) for tick in self.ticks), default=0.0)
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else largest or 1.0
        if largest >= 1e4 or step < 1e-4:
            return [format_number(tick, 2 if largest < 1e5 else 3) for tick in self.ticks]
        decimals = next(digits for digits in range(8) if abs(round(step, digits) - step) < 1e-6 * step)
        return [f"{MINUS if tick < 0 else ''}{abs(tick):.{decimals}f}" for tick in self.ticks]


def axis(values: Iterable[float], *, bounds: tuple[float | None, float | None] = (None, None)) -> Axis:
    """Return an axis over the finite `values`, extended to round ticks. `bounds` fix an end unless they are None."""
    finite = [value for value in values if abs(value) < LARGEST]
    low = bounds[0] if bounds[0] is not None else min(finite, default=0.0)
    high = bounds[1] if bounds[1] is not None else max(finite, default=1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if bounds[0] is not None else low - margin), high + margin
    step = _round_step((high - low) / 4)
    if bounds[0] is None:
        low = math.floor(low / step + 1e-9) * step
    if bounds[1] is None:
        high = math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(at * step for at in range(first, last + 1)))


def step_axis(values: Iterable[float]) -> Axis:
    """Return an axis from the first to the last step number, with round ticks between them."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if high == low:
        return Axis(low - 0.5, high + 0.5, (low,))
    step = max(1.0, _round_step((high - low) / 4))
    ticks = (at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low, high, tuple(ticks))


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean over `window` values (odd), fewer at the ends. Non-finite values are ignored."""
    half = window // 2
    means = []
    for at in range(len(values)):
        near = [value for value in values[max(0, at - half) : at + half + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means
