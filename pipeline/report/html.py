"""Build escaped HTML and SVG, and the frame of the report.

`element` escapes every child that is not `Markup`, and only this module makes `Markup`. Text of a model or a data file
therefore cannot become a tag. As a second protection, the content security policy allows no script, no request, and
only the report's own style sheet.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

STYLE_SHEET = Path(__file__).with_name("report.css")

# Elements without content and end tag.
_VOID = frozenset({"meta", "rect", "line", "circle", "polyline"})
# Control characters and direction overrides could reorder, hide or break the text around them.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markup(str):
    """Text that is HTML already. Only this module makes it from plain text."""

    __slots__ = ()


Child = str | Markup | int | float | None | Iterable["Child"]


def clean(text: str) -> str:
    """Replace control characters except tab and line feed, lone surrogates and direction overrides by U+FFFD."""
    return _HARMFUL.sub("\ufffd", text)


def render(child: Child) -> Markup:
    """Render `child` as HTML. Markup is unchanged, other text is escaped, iterables are joined, and None is empty."""
    if child is None:
        return Markup("")
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return Markup(html.escape(clean(str(child)), quote=True))
    return Markup("".join(render(item) for item in child))


def element(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """Build `<name attributes>children</name>`.

    A trailing underscore of an attribute name is removed (`class_`); other underscores become hyphens. Attributes with
    the value None are left out.
    """
    written = "".join(
        f' {_attribute_name(key)}="{render(value)}"' for key, value in attributes.items() if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{render(children)}</{name}>")


def _attribute_name(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def document(title: str, *body: Child) -> Markup:
    """Build the complete page, with the style sheet inside."""
    sheet = Markup(STYLE_SHEET.read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", sheet),
    )
    return Markup(f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n")


def page(title: str, header: Child, sections: Mapping[str, tuple[str, Markup | None]], footer: str) -> Markup:
    """Build a page of a header, links to its sections, and the sections.

    sections: the text of the link and the section by anchor; a section of None is left out
    """
    shown = {anchor: (name, part) for anchor, (name, part) in sections.items() if part}
    links = [element("a", name, href=f"#{anchor}") for anchor, (name, _) in shown.items()]
    contents = element("nav", links, aria_label="Contents") if links else None
    main = element("main", header, contents, (part for _, part in shown.values()))
    return document(f"{title} - zerochat report", main, element("footer", footer))


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], *, numbers: Iterable[int] = ()) -> Markup:
    """Build a table. `numbers` are the indices of right-aligned numeric columns.

    Wide tables scroll horizontally. On a narrow screen, each row becomes a block with one line per cell, and the name
    of the column stands before the cell.
    """
    numeric, names = set(numbers), list(head)

    def line(cells: Iterable[Child], cell_name: str) -> Markup:
        found = []
        for at, cell in enumerate(cells):
            name = names[at] if cell_name == "td" and at < len(names) else None
            label = name if isinstance(name, str) else None
            found.append(element(cell_name, cell, class_="number" if at in numeric else None, data_label=label))
        return element("tr", found)

    return element(
        "div",
        element("table", element("thead", line(names, "th")), element("tbody", (line(cells, "td") for cells in rows))),
        class_="wide",
    )


def section(anchor: str, title: str, lead: Child, *children: Child) -> Markup:
    """Build one section of the page with its heading and first paragraph."""
    paragraph = element("p", lead, class_="lead") if lead else None
    return element("section", element("h2", title), paragraph, children, id=anchor)


def grid(figures: Iterable[Markup | None]) -> Markup | None:
    """Arrange figures in rows, as many per row as fit. None is left out. Return None without figures."""
    found = [figure for figure in figures if figure]
    return element("div", found, class_="grid") if found else None
