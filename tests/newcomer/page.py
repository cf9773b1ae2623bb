"""Execute a page of the documentation as printed.

Fenced blocks are executed in order, in one folder:

    python   a file; its first line is a comment with the name
    sh       commands
    text     the output of the commands before it

Indented blocks are not executed. In an output, "..." stands for any text. Numbers of a training run depend on the
machine, so an output matches if it has the same words and a number wherever the page has one.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+−]?\d[\d,.:]*(e[-+]\d+)?( ?(s|min|h|MiB|GiB)\b)?")
WEEKDAY = re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str

    @property
    def file_name(self) -> str:
        """The name of the file that a `python` block contains."""
        return self.text.partition("\n")[0].removeprefix("# ")


def read_blocks(page: Path) -> Sequence[Block]:
    """Return the fenced blocks of a page. Raises ValueError for a language without a meaning."""
    blocks = [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]
    for block in blocks:
        if block.language not in ("python", "sh", "text"):
            raise ValueError(f"{page}: a block of {block.language!r} is neither python nor sh nor text")
        if block.language == "python" and not re.fullmatch(r"\w+\.py", block.file_name):
            raise ValueError(f"{page}: the first line of a python block names no file: {block.file_name}")
    return blocks


def without_numbers(text: str) -> str:
    """Return a text in one line, with # for numbers, quantities and weekdays."""
    return re.sub(r"#( #)+", "#", WEEKDAY.sub("#", NUMBER.sub("#", " ".join(text.split()))))


def first_difference(printed: str, expected: str) -> str | None:
    """Return the first part of an expected output that the printed output lacks; None if the outputs agree."""
    rest = without_numbers(printed)
    for part in expected.split("..."):
        words = without_numbers(part)
        _, found, after = rest.partition(words) if words else ("", True, rest)
        if not found:
            return words
        rest = after
    return None


def run_block(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    """Write the file of a `python` block, or run the commands of a `sh` block and return what they print."""
    if block.language == "python":
        (folder / block.file_name).write_text(block.text, encoding="utf-8")
        return ""
    print("$", block.text, end="", flush=True)
    command = ["bash", "-e", "-c", block.text]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\nexit status {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_page(page: Path, folder: Path, environment: Mapping[str, str]) -> Sequence[str]:
    """Execute a page in a folder, and compare each printed output. Returns what each command block printed."""
    outputs: list[str] = []
    for block in read_blocks(page):
        if block.language == "text":
            missing = first_difference(outputs[-1], block.text)
            assert missing is None, f"{page}: the output lacks\n{missing}\n\nThe output:\n{outputs[-1]}"
        elif printed := run_block(block, folder, environment):
            outputs.append(printed)
    return outputs
