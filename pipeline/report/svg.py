"""What every chart of the report is drawn on: its size, its figure, its grid, lines through points.

Colours are classes (`tone-ppo`), so that the style sheet chooses them for light, dark and print. A
chart is `WIDTH` units wide and is shown at about that many pixels, which keeps its type readable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.axes import Axis
from pipeline.report.html import Child, Markup, element

WIDTH, HEIGHT = 360, 216
TOP, BOTTOM, LEFT = 20, 36, 54

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one curve. `tone` is its colour class.

    `sparse` marks values measured now and then, which get a dot each; `exact` ones have no noise to smooth.
    """

    label: str
    points: Sequence[Point]
    tone: str
    sparse: bool = False
    exact: bool = False


def figure(title: str, note: Child, description: str, parts: Child, height: float = HEIGHT) -> Markup:
    """A chart with its title, a line that says how to read it, and `description` for who can't see it."""
    caption = element("figcaption", element("strong", title), element("span", note) if note else None)
    drawing = element("svg", parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=description)
    return element("figure", caption, drawing)


def x_place(across: Axis, value: float, right: float) -> float:
    """The pixel of `value` on the horizontal axis, which ends at `right`."""
    return across.place(value, LEFT, right)


def y_place(up: Axis, value: float) -> float:
    """The pixel of `value` on the vertical axis; SVG counts downwards."""
    return up.place(value, HEIGHT - BOTTOM, TOP)


def scaffold(across: Axis, up: Axis, right: float, x_name: str, y_name: str = "") -> list[Markup]:
    """Rules, ticks and the names of both axes."""
    parts = []
    for tick, label in zip(up.ticks, up.labels(), strict=True):
        y = y_place(up, tick)
        parts.append(element("line", x1=LEFT, x2=right, y1=y, y2=y, class_="rule"))
        parts.append(element("text", label, x=LEFT - 7, y=y + 4, text_anchor="end", class_="tick"))
    parts.append(element("line", x1=LEFT, x2=right, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="base"))
    for tick, label in zip(across.ticks, across.labels(), strict=True):
        x = x_place(across, tick, right)
        parts.append(element("text", label, x=x, y=HEIGHT - BOTTOM + 14, text_anchor="middle", class_="tick"))
    parts.append(element("text", x_name, x=right, y=HEIGHT - 6, text_anchor="end", class_="axis"))
    if y_name:
        parts.append(element("text", y_name, x=0, y=9, class_="axis"))
    return parts


def polyline(places: Sequence[Point], class_: str) -> Markup:
    """One line through `places`, or a dot where there is only one."""
    if len(places) == 1:  # A line of one point is invisible.
        return element("circle", cx=places[0][0], cy=places[0][1], r=1.5, class_=class_.replace("curve", "dot"))
    return element("polyline", points=" ".join(f"{x:g},{y:.1f}" for x, y in places), class_=class_)
