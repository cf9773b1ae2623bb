"""Links of README and docs lead somewhere: to a file that is there, and in pages to a heading that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def headings(page: Path) -> set[str]:
    """Names of a page's headings as a link has them."""
    lines = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        place = page.parent / path if path else page
        if "://" not in link:
            assert place.exists(), link
            assert not heading or heading in headings(place), link
