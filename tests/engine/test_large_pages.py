"""Which memory large pages are asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import large_pages
from engine.large_pages import PAGE_BYTES, ask_for_large_pages

FEW = 100  # bytes between two blocks of an allocator
PROGRAM = """
import torch
from engine import large_pages
from engine.host_allocator import keep_freed_memory
keep_freed_memory()
asked = []
large_pages._madvise = lambda: lambda start, size, _: asked.append((start, start + size))
large_pages.prepare_large_pages(40 * 2**20)
[(start, stop)] = asked
ends = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in [torch.empty(600_000) for _ in range(15)]]
assert all(start - 2**21 <= first and last <= stop for first, last in ends), (start, stop, ends)
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first page, pages), counted from the first page of `room`."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(large_pages, "_madvise", lambda: lambda start, size, _: found.append((start, size)))
    return found


def room(pages: int) -> torch.Tensor:
    """Bytes from the beginning of a large page on."""
    raw = torch.empty((pages + 1) * PAGE_BYTES, dtype=torch.uint8)
    return raw[-raw.data_ptr() % PAGE_BYTES :][: pages * PAGE_BYTES]


def test_whole_pages_within_neighbours(asked: list[tuple[int, int]]) -> None:
    memory = room(8)
    base = memory.data_ptr()
    page = PAGE_BYTES
    first, second = memory[10 : page + page // 2], memory[page + page // 2 + FEW : 4 * page - 1]
    apart = memory[5 * page : 6 * page + 1]
    ask_for_large_pages([apart, second, first])
    assert asked == [(base + page, 2 * page), (base + 5 * page, page)]


def test_nothing_is_asked_for_small_ones_and_for_those_elsewhere(asked: list[tuple[int, int]]) -> None:
    ask_for_large_pages([torch.empty(100), torch.empty(0), torch.empty(2**22, device="meta")])
    assert asked == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_that_was_prepared_is_what_tensors_get_next() -> None:
    """With all that malloc writes between them."""
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, env={})


def test_tensors_keep_their_values() -> None:
    memory = torch.arange(3 * PAGE_BYTES // 8)
    ask_for_large_pages([memory])
    assert torch.equal(memory, torch.arange(3 * PAGE_BYTES // 8))
