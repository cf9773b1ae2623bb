"""Links in the README and in docs/ lead to existing files and existing headings."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    lines = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link:
            assert target.exists(), link
            assert not heading or heading in headings(target), link


def pages_of(nav: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the pages of a navigation tree."""
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages_of(target)


def test_the_site_navigation_has_all_sections_and_pages() -> None:
    nav = runpy.run_path(str(ROOT / ".ci" / "site.py"))["navigation"]((DOCS / "index.md").read_text())
    assert [name for entry in nav for name in entry] == [
        "Home", "Tutorial", "How-to guides", "Reference", "Engineering",
    ]  # fmt: skip
    assert "Models and data" in [name for entry in nav[2]["How-to guides"] for name in entry]
    results = list(pages_of(nav))
    assert sorted(results) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
