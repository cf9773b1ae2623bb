"""Draw the common elements of all charts: figure, grid, axis labels and lines.

Colours are CSS classes (`tone-ppo`), so that the style sheet can set them for light mode, dark mode and print. A chart
is `WIDTH` units wide and is displayed at about as many pixels, which keeps its text readable.
"""

import hashlib
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

    `sparse`: only some steps have a value; each value is drawn as a dot. `exact`: the values have no noise and are not
    smoothed. `faint`: the curve is drawn thin, without a label.
    """

    label: str
    points: Sequence[Point]
    tone: str
    sparse: bool = False
    exact: bool = False
    faint: bool = False


def figure(title: str, note: Child, description: str, parts: Child, height: float = HEIGHT) -> Markup:
    """Build a chart with its title and a note below. `description` is the text for screen readers.

    The title links to a large view: the same figure as the target of the link, which the style sheet shows on the whole
    screen.
    """
    drawing = element("svg", parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=description)
    name = f"chart-{hashlib.sha256(f'{title}{description}{drawing}'.encode('utf-8', 'replace')).hexdigest()[:10]}"
    enlarge = element("a", title, href=f"#{name}", title="Large view")
    shrink = element("a", "Close", href=f"#{name}-closed", class_="close")
    caption = element("figcaption", element("strong", enlarge), element("span", note) if note else None, shrink)
    place = element("span", id=f"{name}-closed")  # closing the large view returns to the chart
    return element("figure", place, caption, drawing, id=name)


def x_pixel(across: Axis, value: float, right: float) -> float:
    """Return the pixel of `value` on the horizontal axis, which ends at `right`."""
    return across.pixel(value, LEFT, right)


def y_pixel(up: Axis, value: float) -> float:
    """Return the pixel of `value` on the vertical axis. SVG counts pixels downwards."""
    return up.pixel(value, HEIGHT - BOTTOM, TOP)


def scaffold(across: Axis, up: Axis, right: float, x_name: str, y_name: str = "") -> list[Markup]:
    """Draw the grid lines, ticks and names of both axes."""
    parts = []
    for tick, label in zip(up.ticks, up.labels(), strict=True):
        y = y_pixel(up, tick)
        parts.append(element("line", x1=LEFT, x2=right, y1=y, y2=y, class_="rule"))
        parts.append(element("text", label, x=LEFT - 7, y=y + 4, text_anchor="end", class_="tick"))
    parts.append(element("line", x1=LEFT, x2=right, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="base"))
    for tick, label in zip(across.ticks, across.labels(), strict=True):
        x = x_pixel(across, tick, right)
        parts.append(element("text", label, x=x, y=HEIGHT - BOTTOM + 14, text_anchor="middle", class_="tick"))
    parts.append(element("text", x_name, x=right, y=HEIGHT - 6, text_anchor="end", class_="axis"))
    if y_name:
        parts.append(element("text", y_name, x=0, y=9, class_="axis"))
    return parts


def polyline(points: Sequence[Point], class_: str) -> Markup:
    """Draw one line through `points`, or a dot for a single point."""
    if len(points) == 1:  # A line of one point is invisible.
        return element("circle", cx=points[0][0], cy=points[0][1], r=1.5, class_=class_.replace("curve", "dot"))
    return element("polyline", points=" ".join(f"{x:g},{y:.1f}" for x, y in points), class_=class_)
