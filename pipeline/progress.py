"""What this rank does now: phase, step and collective, in a row of memory that its launcher reads.

The launcher makes one row for each of its ranks and passes the descriptor in the environment. A rank writes to memory
only, so a full or blocked disk does not matter. The launcher reads the row of a stopped process too. This module does
not import torch, because the launcher does not.
"""

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

DESCRIPTOR = "ZEROCHAT_PROGRESS"
"""The environment variable with the file descriptor of a rank's row."""
ROW = struct.Struct("<QdQQ?32s96s")  # moves, limit, step, collective number, inside it, phase, collective
ROW_BYTES = mmap.PAGESIZE
MULTIPLE = 10.0  # of the slowest step or phase
SHORTEST = 300.0  # a shared file system may not answer for minutes, while another server takes over
UNMEASURED = 1800.0
"""Seconds without progress that are allowed in a phase that this process has not finished before."""
ALONE = 86400.0  # seconds for work that other ranks wait for: the data, which rank 0 reads, and downloads


@dataclass(frozen=True)
class Moment:
    """The content of a row.

    moves: changes since the start of the rank; 0 if it has not started
    limit: seconds without a change after which the rank counts as hung
    collective: name and shape of the newest collective of the main thread, `inside` whether it has not returned
    """

    moves: int
    limit: float
    step: int
    number: int
    inside: bool
    phase: str
    collective: str


class Row:
    """The memory of one row, shared by a rank and its launcher."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the row of a descriptor; None makes a new row, whose descriptor is `descriptor`."""
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, ROW_BYTES)

    def read(self) -> Moment:
        """Return the content. A rank that writes at the same time can make fields of two moments meet."""
        moves, limit, step, number, inside, phase, collective = ROW.unpack_from(self._memory)
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in (phase, collective))
        return Moment(moves, limit, step, number, inside, *texts)

    def write(self, *numbers: float, phase: str, collective: str) -> None:
        """Write the fields of a `Moment`; the numbers are in its order."""
        ROW.pack_into(self._memory, 0, *numbers, phase.encode(errors="replace"), collective.encode(errors="replace"))

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def _new_file() -> int:
    """Return the descriptor of an anonymous file: in memory on Linux, in the temporary folder on other systems."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("zerochat-progress")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, ROW_BYTES)
    return descriptor


class Progress:
    """The progress of this rank, written to its row. Only the main thread calls the methods and counts.

    Limits: `hang_seconds` while the stage takes steps. If it is None, the limit is `MULTIPLE` times the slowest step,
    or the slowest visit of the phase, but at least `SHORTEST`. Before the first step, after the last one, and in a
    phase that no visit in a step has measured, the limit is at least `UNMEASURED`. `hang_seconds` always holds for
    calls of a user's function.
    """

    def __init__(self, row: Row | None = None) -> None:
        self._row = row or Row()
        self._moves = self._number = self._step = 0
        self._phase, self._collective, self._inside, self._limit = "start", "", False, UNMEASURED
        self._hang_seconds: float | None = None
        self._slowest_step: float | None = None
        self._slowest: dict[str, float] = {}
        self._thread = threading.get_ident()
        self._write()

    def configure(self, hang_seconds: float | None) -> None:
        """Set `engine.hang_seconds`."""
        self._hang_seconds = hang_seconds

    def begin_step(self, step: int, previous_seconds: float | None) -> None:
        """Publish the step that begins; 0 after the last step. `previous_seconds` is the time of the step before."""
        if previous_seconds is None:
            self._slowest.clear()  # before the first step, a phase may have other work
        else:
            self._slowest_step = max(previous_seconds, self._slowest_step or 0.0)
        self._step = step
        self._enter("" if step else "finish")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Publish a phase of the stage, and measure it."""
        outer, began = self._phase, time.monotonic()
        self._enter(name)
        try:
            yield
        finally:
            self._slowest[name] = max(time.monotonic() - began, self._slowest.get(name, 0.0))
            self._enter(outer)

    def _enter(self, phase: str) -> None:
        self._phase, self._limit = phase, self.limit(phase)
        self._write()

    def limit(self, phase: str) -> float:
        """Return the seconds without a change after which this rank counts as hung in a phase."""
        if self._step and self._hang_seconds is not None:
            return self._hang_seconds
        measured = self._slowest_step if phase == "" else self._slowest.get(phase)
        if self._step == 0 or measured is None:
            return max(UNMEASURED, self._hang_seconds or 0.0)
        return max(SHORTEST, MULTIPLE * max(measured, self._slowest_step or 0.0))

    def advance(self) -> None:
        """Publish a part of work without collectives: a micro-batch, a decode step, or the answer of a judge."""
        self._write()

    @contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """Raise the limit to some seconds: ALONE for work that the other ranks wait for, UNMEASURED for a disk."""
        with self._limited(max(self._limit, seconds)):
            yield

    @contextmanager
    def user_calls(self) -> Iterator[None]:
        """Let `hang_seconds` hold before the first step and after the last one too, where starts may take longer."""
        with self._limited(self._limit if self._hang_seconds is None else self._hang_seconds):
            yield

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        before, self._limit = self._limit, seconds
        self._write()
        try:
            yield
        finally:
            self._limit = before
            self._write()

    @contextmanager
    def collective(self, name: str, shape: Sequence[int]) -> Iterator[None]:
        """Publish that the main thread is in a collective. The shape is that of this rank's tensor."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._number += 1
        self._collective, self._inside = f"{name}{list(shape)}" if shape else name, True
        self._write()
        try:
            yield
        finally:
            self._inside = False
            self._write()

    def _write(self) -> None:
        self._moves += 1
        numbers = self._moves, self._limit, self._step, self._number, self._inside
        self._row.write(*numbers, phase=self._phase, collective=self._collective)


_progress: Progress | None = None


def own() -> Progress:
    """Return the progress of this process. The row is that of the launcher, or unread memory without a launcher."""
    global _progress
    if _progress is None:
        descriptor = os.environ.get(DESCRIPTOR)
        _progress = Progress(None if descriptor is None else Row(int(descriptor)))
    return _progress
