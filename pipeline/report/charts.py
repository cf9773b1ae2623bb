"""Draw path charts, scatter charts, interval charts, and bar charts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.axes import MINUS, Axis, axis, format_number
from pipeline.report.html import Child, Markup, element
from pipeline.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    TOP,
    WIDTH,
    Series,
    figure,
    polyline,
    scaffold,
    x_pixel,
    y_pixel,
)

MOST_DOTS = 400


@dataclass(frozen=True)
class Interval:
    """A mean with the interval around it; low and high may be nan."""

    label: str
    mean: float
    low: float
    high: float
    tone: str


@dataclass(frozen=True)
class Bar:
    """One bar with its label and the text after it."""

    label: str
    value: float
    text: str
    tone: str = "plain"


def path_chart(
    title: str,
    points: Sequence[tuple[float, float, float]],
    *,
    x_name: str,
    y_name: str,
    note: Child = "",
    y_bounds: tuple[float | None, float | None] = (None, None),
) -> Markup | None:
    """Draw the path of two measures over steps, from points (step, x, y). Return None for fewer than two points."""
    path = [point for point in points if all(math.isfinite(value) for value in point)]
    if len(path) < 2:
        return None
    across, up = axis([x for _, x, _ in path]), axis([y for _, _, y in path], bounds=y_bounds)
    right = WIDTH - 16
    pixels = [(x_pixel(across, x, right), y_pixel(up, y)) for _, x, y in path]
    parts: list[Child] = [scaffold(across, up, right, x_name, y_name), polyline(pixels, "curve tone-ppo faint")]
    for at, ((step, x, y), (left, top)) in enumerate(zip(path, pixels, strict=True)):
        share = at / (len(path) - 1)
        dot = element(
            "circle",
            cx=left,
            cy=top,
            r=4 if at in (0, len(path) - 1) else 3,
            class_="dot tone-ppo",
            fill_opacity=round(0.25 + 0.75 * share, 2),
        )
        hint = f"rollout {step:g}: {x_name} {format_number(x)}, {y_name} {format_number(y)}"
        parts.append(element("g", element("title", hint), dot))
    for at, neighbour, word in ((0, 1, "start"), (-1, -2, "end")):
        (left, top), (_, other) = pixels[at], pixels[neighbour]
        anchor = "start" if left < (LEFT + right) / 2 else "end"
        below = other < top and top < HEIGHT - BOTTOM - 20  # Place the label on the side without the path.
        label = f"{word}, rollout {path[at][0]:g}"
        y = top + 18 if below else top - 10
        parts.append(element("text", label, x=left, y=y, text_anchor=anchor, class_="label halo"))
    return figure(title, note, f"{title}: {len(path)} evaluations", parts)


def scatter_chart(
    title: str,
    groups: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    note: Child = "",
    y_bounds: tuple[float | None, float | None] = (None, None),
) -> Markup | None:
    """Draw the dots of one or more groups, with a legend above them. Return None without dots."""
    shown = [one for one in groups if one.points]
    if not shown:
        return None
    across = axis([x for one in shown for x, _ in one.points])
    up = axis([y for one in shown for _, y in one.points], bounds=y_bounds)
    right = WIDTH - 16
    parts: list[Child] = [scaffold(across, up, right, x_name, y_name)]
    for one in shown:
        parts += [
            element(
                "circle",
                cx=x_pixel(across, x, right),
                cy=y_pixel(up, y),
                r=3,
                class_=f"dot tone-{one.tone}",
                fill_opacity=0.55,
            )
            for x, y in one.points[:MOST_DOTS]
        ]
    x_end = float(right)
    for one in reversed(shown):
        parts.append(element("text", one.label, x=x_end, y=9, text_anchor="end", class_=f"label tone-{one.tone}"))
        x_end -= 6.5 * len(one.label) + 12
    count = sum(len(one.points) for one in shown)
    return figure(title, note, f"{title}: {count} answers", parts)


def interval_chart(
    title: str,
    rows: Sequence[Interval],
    *,
    x_name: str,
    note: Child = "",
    bounds: tuple[float | None, float | None] = (None, None),
) -> Markup | None:
    """Draw means as dots on one scale, each with its interval as a line. Return None without rows."""
    if not rows:
        return None
    left, right, row_height = max(46.0, 10 + 6.6 * max(len(row.label) for row in rows)), WIDTH - 62, 34
    height = TOP + row_height * len(rows) + BOTTOM
    ends = [end for row in rows for end in (row.low, row.high, row.mean)]
    across = axis(ends, bounds=bounds)
    parts: list[Child] = []
    for tick, label in zip(across.ticks, across.labels(), strict=True):
        x = across.pixel(tick, left, right)
        parts.append(element("line", x1=x, x2=x, y1=TOP, y2=height - BOTTOM, class_="rule"))
        parts.append(element("text", label, x=x, y=height - BOTTOM + 14, text_anchor="middle", class_="tick"))
    parts.append(element("text", x_name, x=right, y=height - 6, text_anchor="end", class_="axis"))
    for at, row in enumerate(rows):
        y = TOP + row_height * (at + 0.5)
        x = across.pixel(row.mean, left, right)
        parts.append(element("text", row.label, x=0, y=y + 4.5, class_=f"label strong tone-{row.tone}"))
        if math.isfinite(row.low) and math.isfinite(row.high):
            span = {"x1": across.pixel(row.low, left, right), "x2": across.pixel(row.high, left, right)}
            parts.append(element("line", **span, y1=y, y2=y, class_=f"interval tone-{row.tone}"))
        parts.append(element("circle", cx=x, cy=y, r=5.5, class_=f"dot ringed tone-{row.tone}"))
        value = f"{row.mean:.2f}".replace("-", MINUS)
        parts.append(element("text", value, x=WIDTH, y=y + 5, text_anchor="end", class_="label big"))
    spoken = ", ".join(f"{row.label} {format_number(row.mean)}" for row in rows)
    return figure(title, note, f"{title}: {spoken}", parts, height)


def bar_chart(
    title: str, rows: Sequence[Bar], *, note: Child = "", full: float | None = None, reference: float | None = None
) -> Markup | None:
    """Draw horizontal bars from 0 to `full` (default: the largest value). Return None without rows."""
    if not rows:
        return None
    row_height, right = 34, WIDTH - 104
    height = row_height * len(rows) + 4
    across = Axis(0.0, full or max(row.value for row in rows) or 1.0, ())
    parts: list[Child] = []
    for at, row in enumerate(rows):
        top = row_height * at + 17
        width = max(across.pixel(row.value, 0, right), 1)
        parts.append(element("text", row.label, x=0, y=top - 4, class_="label"))
        parts.append(element("rect", x=0, y=top, width=right, height=9, rx=2, class_="track"))
        parts.append(element("rect", x=0, y=top, width=width, height=9, rx=2, class_=f"bar tone-{row.tone}"))
        if reference is not None:
            x = across.pixel(reference, 0, right)
            parts.append(element("line", x1=x, x2=x, y1=top - 2, y2=top + 11, class_="mark"))
        parts.append(element("text", row.text, x=right + 8, y=top + 9, class_="label"))
    spoken = ", ".join(f"{row.label} {row.text}" for row in rows)
    return figure(title, note, f"{title}: {spoken}", parts, height)


def histogram_chart(
    title: str, groups: Sequence[Series], *, x_name: str, note: Child = "", bins: int = 16
) -> Markup | None:
    """Draw how often each value occurs, one outline per group, from the second numbers of its points.

    All groups have the same bins. Return None without values.
    """
    values = {one.label: [y for _, y in one.points if math.isfinite(y)] for one in groups}
    shown = [one for one in groups if values[one.label]]
    if not shown:
        return None
    across = axis([value for one in shown for value in values[one.label]])
    counts = {one.label: bin_counts(values[one.label], across.low, across.high, bins) for one in shown}
    up = axis([0, *(count for found in counts.values() for count in found)])
    right = WIDTH - 16
    parts: list[Child] = [scaffold(across, up, right, x_name, "answers")]
    x_end = float(right)
    for one in shown:
        corners = [(x_pixel(across, across.low, right), y_pixel(up, 0))]
        for at, count in enumerate(counts[one.label]):
            ends = (across.low + (across.high - across.low) * edge / bins for edge in (at, at + 1))
            corners += [(x_pixel(across, end, right), y_pixel(up, count)) for end in ends]
        corners.append((x_pixel(across, across.high, right), y_pixel(up, 0)))
        shape = " ".join(f"{x:g},{y:.1f}" for x, y in corners)
        parts.append(element("polyline", points=shape, class_=f"area tone-{one.tone}"))
    for one in reversed(shown):
        parts.append(element("text", one.label, x=x_end, y=9, text_anchor="end", class_=f"label tone-{one.tone}"))
        x_end -= 6.5 * len(one.label) + 12
    spoken = ", ".join(f"{one.label}: {len(values[one.label])} answers" for one in shown)
    return figure(title, note, f"{title}, {spoken}", parts)


def bin_counts(values: Sequence[float], low: float, high: float, bins: int) -> list[int]:
    """Return how many values each of `bins` equal parts of [low, high] holds. The last part includes `high`."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, math.floor((value - low) / (high - low) * bins)))] += 1
    return counts


def meter(share: float, tone: str) -> Markup:
    """Draw a small inline bar for a value in [0, 1]."""
    width = Axis(0.0, 1.0, ()).pixel(share, 0, 44)
    track = element("rect", x=0, y=0, width=44, height=6, rx=2, class_="track")
    bar = element("rect", x=0, y=0, width=width, height=6, rx=2, class_=f"bar tone-{tone}")
    return element("svg", track, bar, viewBox="0 0 44 6", class_="meter", aria_hidden="true")
