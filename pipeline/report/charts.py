"""Draw scatter charts, interval charts, and histograms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.report.axes import MINUS, axis, format_number
from pipeline.report.html import Child, Markup, element
from pipeline.report.svg import BOTTOM, TOP, WIDTH, Frame, Series, figure, polyline

MOST_DOTS = 400


@dataclass(frozen=True)
class Interval:
    """A mean with the interval around it; low and high may be nan."""

    label: str
    mean: float
    low: float
    high: float
    tone: str


def scatter_chart(
    title: str,
    groups: Sequence[Series],
    *,
    x_name: str,
    y_name: str,
    note: Child = "",
    y_bounds: tuple[float | None, float | None] = (None, None),
) -> Markup | None:
    """Draw the dots of one or more groups, with a legend above them. Return None without dots.

    Of a group with more than `MOST_DOTS` dots, every n-th dot is drawn. A thin line connects the dots of a group with
    `sparse` in their order.
    """
    shown = [one for one in groups if one.points]
    if not shown:
        return None
    across = axis([x for one in shown for x, _ in one.points])
    up = axis([y for one in shown for _, y in one.points], bounds=y_bounds)
    frame = Frame(across, up)
    parts: list[Child] = [frame.draw(x_name, y_name)]
    for one in shown:
        pixels = [frame.pixel(*point) for point in one.points[:: math.ceil(len(one.points) / MOST_DOTS)]]
        if one.sparse:
            parts.append(polyline(pixels, f"curve tone-{one.tone} faint"))
        parts += [
            element("circle", cx=x, cy=y, r=3, class_=f"dot tone-{one.tone}", fill_opacity=0.55) for x, y in pixels
        ]
    parts.append(_legend(shown, frame.right))
    count = sum(len(one.points) for one in shown)
    return figure(title, note, f"{title}: {count} dots", parts)


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
    span = across.low, across.high
    counts = {one.label: np.histogram(values[one.label], bins, span)[0].tolist() for one in shown}
    up = axis([0, *(count for found in counts.values() for count in found)])
    frame = Frame(across, up)
    parts: list[Child] = [frame.draw(x_name, "answers")]
    edges = np.linspace(*span, bins + 1).tolist()
    for one in shown:
        steps = [(edges[at + end], count) for at, count in enumerate(counts[one.label]) for end in (0, 1)]
        corners = [frame.pixel(*corner) for corner in ((across.low, 0), *steps, (across.high, 0))]
        parts.append(polyline(corners, f"area tone-{one.tone}"))
    parts.append(_legend(shown, frame.right))
    spoken = ", ".join(f"{one.label}: {len(values[one.label])} answers" for one in shown)
    return figure(title, note, f"{title}, {spoken}", parts)


def _legend(groups: Sequence[Series], right: float) -> list[Markup]:
    """Draw the labels of groups in one line, which ends at `right`."""
    labels = []
    for one in reversed(groups):
        labels.append(element("text", one.label, x=right, y=9, text_anchor="end", class_=f"label tone-{one.tone}"))
        right -= 6.5 * len(one.label) + 12
    return labels
