"""Numbers as a reader wants them, and axes: round ticks, ranges, and the way from a value to a pixel."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b⁰¹²³⁴⁵⁶⁷⁸⁹")
MINUS = "\u2212"
LARGEST = 1e300  # Differences of larger values overflow; as curves they are as good as infinite.


def format_number(value: float, digits: int = 3) -> str:
    """`value` with about `digits` significant digits, a true minus sign, and k, M, G or a power of ten if long."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else f"{MINUS}infinite"
    sign, size = (MINUS if value < 0 else ""), abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        return sign + _power(size)
    for limit, divisor, letter in ((1e15, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return sign + (_power(size) if letter == "T" else _plain(size / divisor, digits) + letter)
    return sign + _plain(size, digits)


def _plain(size: float, digits: int) -> str:
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{size:.{decimals}f}"


def _power(size: float) -> str:
    exponent = math.floor(math.log10(size))
    factor = round(size / 10.0**exponent, 1)
    if factor == 10:
        factor, exponent = 1.0, exponent + 1
    power = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return power if factor == 1 else f"{factor:g}×{power}"


def format_signed(value: float, decimals: int = 2) -> str:
    """`value` with its sign always shown: a difference."""
    shown = f"{abs(value):.{decimals}f}"
    if float(shown) == 0:
        return shown
    return f"{MINUS if value < 0 else '+'}{shown}"


def format_interval(low: float, high: float) -> str:
    """The 95% interval of a difference; with more decimals where two would not show on which side of zero it lies."""
    nearest = min(abs(low), abs(high))
    decimals = 2
    if low * high > 0:
        while decimals < 6 and float(f"{nearest:.{decimals}f}") == 0:
            decimals += 1
    return f"{format_signed(low, decimals)} to {format_signed(high, decimals)}"


def format_seconds(seconds: float) -> str:
    """A duration in the two units that matter."""
    if seconds < 60:
        return f"{format_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


@dataclass(frozen=True)
class Axis:
    """A linear axis from `low` to `high` with `ticks` between them."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float, start: float, end: float) -> float:
        """The pixel of `value` when `low` is at `start` and `high` at `end`; values outside stop at the border."""
        share = (value - self.low) / (self.high - self.low)
        return round(start + min(max(share, 0.0), 1.0) * (end - start), 1)

    def labels(self) -> list[str]:
        """The ticks as text, all with the same number of decimals."""
        largest = max((abs(tick) for tick in self.ticks), default=0.0)
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else largest or 1.0
        if largest >= 1e4 or step < 1e-4:
            return [format_number(tick, 2 if largest < 1e5 else 3) for tick in self.ticks]
        decimals = next(digits for digits in range(8) if abs(round(step, digits) - step) < 1e-6 * step)
        return [f"{MINUS if tick < 0 else ''}{abs(tick):.{decimals}f}" for tick in self.ticks]


def axis(values: Iterable[float], *, bounds: tuple[float | None, float | None] = (None, None), count: int = 4) -> Axis:
    """An axis over the finite `values`, widened to round ticks; a bound that is given is kept as the end."""
    finite = [value for value in values if abs(value) < LARGEST]
    low = bounds[0] if bounds[0] is not None else min(finite, default=0.0)
    high = bounds[1] if bounds[1] is not None else max(finite, default=1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if bounds[0] is not None else low - margin), high + margin
    step = _round_step((high - low) / count)
    if bounds[0] is None:
        low = math.floor(low / step + 1e-9) * step
    if bounds[1] is None:
        high = math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(at * step for at in range(first, last + 1)))


def step_axis(values: Iterable[float]) -> Axis:
    """An axis over step numbers: it begins and ends where they do, with round ticks between."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if high == low:
        return Axis(low - 0.5, high + 0.5, (low,))
    step = max(1.0, _round_step((high - low) / 4))
    ticks = (at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low, high, tuple(ticks))


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The centred mean over `window` values (odd), over fewer at the ends; values that are not finite don't count."""
    half = window // 2
    means = []
    for at in range(len(values)):
        near = [value for value in values[max(0, at - half) : at + half + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means
