"""MkDocs hooks: the navigation comes from docs/index.md, and links that leave docs/ become plain text."""

import re
from pathlib import Path
from typing import Any

Nav = list[dict[str, Any]]


def navigation(index: str) -> Nav:
    """Return the navigation of the links in docs/index.md: sections (##), groups (a line ending with ":"), pages."""
    nav: Nav = [{"Home": "index.md"}]
    pages = group = nav
    for line in index.splitlines():
        link = re.match(r"- \[(.+?)\]\((\S+?\.md)\)", line)
        if line.startswith("## "):
            pages = group = []
            nav.append({line[3:].strip(): pages})
        elif re.fullmatch(r"[A-Z][\w ]*:", line):
            group = []
            pages.append({line[:-1]: group})
        elif link:
            group.append({link[1]: link[2]})
    return nav


def on_config(config: Any, **_: Any) -> Any:
    config["nav"] = navigation((Path(config["docs_dir"]) / "index.md").read_text(encoding="utf-8"))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/")
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{depth + 1}}}[^)]*\)", r"\1", markdown)
