"""A headless Chromium for the tests of the pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.pipeline.serve.running import LIMIT

CHROMIUM = Path(shutil.which("chromium") or shutil.which("google-chrome") or "/usr/bin/chromium")
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
needs_chromium = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: install Debian's chromium package"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser whose expectations have the time limit of the other tests."""
    expect.set_options(timeout=LIMIT * 1000)
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield browser
        browser.close()
