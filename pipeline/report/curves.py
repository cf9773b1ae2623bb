"""Draw curves over steps: a thin line for the values, a thick line for their running mean, and labels at the ends.

The mouse pointer shows the values of a step. This needs only the style sheet, no script.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeline.report.axes import axis, format_number, running_mean, step_axis
from pipeline.report.html import Child, Markup, element
from pipeline.report.svg import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Frame, Point, Series, figure, polyline

MOST_POINTS = 400
FEWEST_SMOOTHED = 40
HOVER_COLUMNS = 40
LINE_HEIGHT = 13


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str,
    note: Child = "",
    bounds: tuple[float | None, float | None] = (None, None),
    reference: float | None = None,
) -> Markup | None:
    """Draw curves over steps. Curves that are not faint have labels at their ends and show values under the pointer.

    Return None if no series has a finite value.
    """
    shown = [one for one in series if any(math.isfinite(y) for _, y in one.points)]
    if not shown:
        return None
    shown = [replace(one, points=_thinned(one.points)) for one in shown]
    marks = [] if reference is None else [reference]
    across = step_axis(x for one in shown for x, _ in one.points)
    up = axis([y for one in shown for _, y in one.points] + marks, bounds=bounds)
    labelled = [one for one in shown if not one.faint] or shown
    label_width = max(44.0, *(12 + 6.6 * len(format_number(_last(one))) for one in labelled))
    if len(labelled) > 1:
        label_width = max(label_width, 26 + 6.2 * max(len(one.label) for one in labelled))
    frame = Frame(across, up, WIDTH - label_width)
    parts: list[Child] = [frame.draw(x_name)]
    if reference is not None:
        _, y = frame.pixel(0, reference)
        parts.append(element("line", x1=LEFT, x2=frame.right, y1=y, y2=y, class_="reference"))
    parts += [_curve(one, frame) for one in shown]
    parts += [_end_labels(labelled, frame), _hover(labelled, frame, x_name)]
    return figure(title, note, _description(title, shown, x_name), parts)


def _curve(one: Series, frame: Frame) -> list[Markup]:
    pixels = [frame.pixel(*point) for point in one.points]
    tone = f"tone-{one.tone}"
    if one.faint:
        return _line_segments(pixels, f"curve faint {tone}")
    if one.sparse or len(pixels) < 2:
        finite = [pixel for pixel in pixels if math.isfinite(pixel[1])]
        dots = [element("circle", cx=x, cy=y, r=3, class_=f"dot {tone}") for x, y in finite]
        return [polyline(finite, f"curve thin {tone}"), *dots]
    if one.exact or len(pixels) < FEWEST_SMOOTHED:
        return _line_segments(pixels, f"curve {tone}")
    window = max(3, len(pixels) // 20) | 1
    smooth = running_mean([y for _, y in pixels], window)
    means = [(x, mean) for (x, _), mean in zip(pixels, smooth, strict=True)]
    return _line_segments(pixels, f"curve faint {tone}") + _line_segments(means, f"curve {tone}")


def _line_segments(points: Sequence[Point], class_: str) -> list[Markup]:
    """Draw lines through `points`, with a gap at each value that is not finite."""
    segments: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    return [polyline(segment, class_) for segment in segments if segment]


def _end_labels(shown: Sequence[Series], frame: Frame) -> list[Markup]:
    """Draw the last value of each curve at its end, and its name if there are several. Labels do not overlap."""
    labels = sorted(((frame.pixel(0, _last(one))[1], one) for one in shown), key=lambda label: label[0])
    block = LINE_HEIGHT * (1 if len(shown) == 1 else 2)
    free = HEIGHT - BOTTOM - block * len(labels)
    tops: list[float] = []
    for at, (pixel, _) in enumerate(labels):
        earliest = tops[-1] + block if tops else 0.0
        tops.append(round(max(min(pixel - block / 2, free + block * at), earliest), 1))
    texts = []
    for top, (_, one) in zip(tops, labels, strict=True):
        tone = f"label tone-{one.tone}"
        if len(shown) > 1:
            texts.append(element("text", one.label, x=frame.right + 7, y=top + 10, class_=tone))
        line = top + 10 + (LINE_HEIGHT if len(shown) > 1 else 0)
        texts.append(element("text", format_number(_last(one)), x=frame.right + 7, y=line, class_=f"{tone} strong"))
    return texts


def _last(one: Series) -> float:
    """Return the last finite value of a series."""
    return next(y for _, y in reversed(one.points) if math.isfinite(y))


def _hover(shown: Sequence[Series], frame: Frame, x_name: str) -> list[Markup]:
    """Draw invisible columns that show the values of a step under the mouse pointer."""
    steps = sorted({x for one in shown for x, _ in one.points})
    shown_steps = steps[:: math.ceil(len(steps) / HOVER_COLUMNS)]
    pixels = [frame.pixel(step, 0)[0] for step in shown_steps]
    columns = []
    for at, (step, x) in enumerate(zip(shown_steps, pixels, strict=True)):
        start = LEFT if at == 0 else (pixels[at - 1] + x) / 2
        end = frame.right if at == len(shown_steps) - 1 else (x + pixels[at + 1]) / 2
        values = [(one, dict(one.points).get(step, math.nan)) for one in shown]
        texts = [
            f"{one.label + ' ' if len(shown) > 1 else ''}{format_number(value, 4)}"
            for one, value in values
            if math.isfinite(value)
        ]
        tip = f"{x_name} {format_number(step, 4)}: {', '.join(texts) or 'no value'}"
        anchor = "start" if x < LEFT + (frame.right - LEFT) / 2 else "end"
        columns.append(
            element(
                "g",
                element("rect", x=round(start, 1), y=0, width=round(max(end - start, 1), 1), height=HEIGHT - BOTTOM),
                element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM),
                element("text", tip, x=LEFT if anchor == "start" else WIDTH, y=9, text_anchor=anchor),
                class_="hover",
            )
        )
    return columns


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Reduce `points` to at most MOST_POINTS: the mean of each group of steps, at the last step of the group."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / MOST_POINTS)
    thin = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        finite = [y for _, y in run if math.isfinite(y)]
        thin.append((run[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return thin


def _description(title: str, shown: Sequence[Series], x_name: str) -> str:
    ranges = [
        f"{one.label} from {format_number(one.points[0][1])} to {format_number(one.points[-1][1])}" for one in shown
    ]
    return f"{title} over {x_name}s: {'; '.join(ranges)}"
