"""Ranks of one host wait for one another by counts in memory that they share.

A rank that waits looks again and again instead of sleeping until a message comes: that takes microseconds where Gloo
takes three tenths of a millisecond, and two while a processor wakes up. One whose mates are long in coming sleeps after
all, so that their threads have its core.
"""

import os
import platform
import select
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.parallel import dist
from engine.parallel.rank_errors import LostMate

LINE = 64  # bytes: each rank's count has a line of the cache to itself
KEEN = 2e-3  # seconds of looking without a break
NAP = 1e-4  # seconds between looks from then on
LOOK = 1.0  # seconds between looks at whether the mates are still there


class Watch:
    """Over processes that this one waits for, one of which may have ended."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._next = time.monotonic() + LOOK
        self._until = time.monotonic() + dist.TIMEOUT.total_seconds()

    def look(self) -> None:
        """To be called again and again. Raises LostMate where there is nobody, or nothing, to wait for."""
        if time.monotonic() > self._next:
            if time.monotonic() > self._until or any(map(_has_ended, self._processes)):
                raise LostMate("a rank of this rank's group has stopped in the middle of a pass")
            self._next += LOOK


class Meeting:
    """The counts (ranks, LINE) uint8, of zeros, of how often each rank has come to `meet`."""

    def __init__(self, memory: Tensor, rank: int, processes: Sequence[int]) -> None:
        """`processes` are the other ranks' ids: where one of them has ended, nobody waits for it."""
        self._counts = memory.view(torch.int64).numpy()[:: LINE // 8]
        self._rank, self._processes, self._came = rank, processes, 0

    def meet(self) -> None:
        """Wait until every rank is here; what each wrote before, all read afterwards. Raises LostMate."""
        self._came += 1
        self._counts[self._rank] = self._came
        if self._counts.min() >= self._came:
            return
        keen_until, watch = time.monotonic() + KEEN, Watch(self._processes)
        while self._counts.min() < self._came:
            if time.monotonic() < keen_until:
                os.sched_yield()
            else:
                time.sleep(NAP)
                watch.look()


def writes_in_order() -> bool:
    """Whether others see what this processor writes in the order it is written, so that a count tells of the rest."""
    return platform.machine() == "x86_64"


def _has_ended(process: int) -> bool:
    """Also of one whose parent has not asked for its status yet."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 0)[0])
    finally:
        os.close(handle)
