"""Gathers and exchanges between the ranks of one host through memory that they share, instead of Gloo's sockets.

Each rank has a box with two halves, written by it and read by all. A message goes through it in chunks: write one half,
meet, read the others' halves; meanwhile the other half may still be read. So no more than a few megabytes are shared,
whatever is sent, and a chunk is read while it is still in the cache.

Ranks meet by counts in the same memory (meeting.py), on processors that write in order; on others by Gloo.
"""

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.parallel import dist, shared_memory
from engine.parallel.meeting import LINE, Meeting, writes_in_order

HALF = 2**22  # bytes


class Mailbox:
    """Boxes (ranks, 2, HALF) uint8 in shared memory. All calls are collective."""

    def __init__(self, memory: Tensor, rank: int, ranks: int, meeting: Meeting | None = None) -> None:
        self._boxes = memory.view(ranks, 2, HALF)
        self._rank, self._ranks, self._meeting = rank, ranks, meeting

    def gather(self, output: Tensor, mine: Tensor, group: ProcessGroup) -> None:
        """Every rank's `mine` (n,) in `output` (ranks n,), in rank order; `mine` may be its own place in there."""
        rows, own = output.view(self._ranks, -1), mine
        if rows[self._rank].data_ptr() != own.data_ptr():
            rows[self._rank].copy_(own)
        width = HALF // own.itemsize
        for half, start, end in self._chunks(len(own), width):
            self._open(half, own.dtype)[self._rank, : end - start] = own[start:end]
            self._meet(group)
            for rank in self._others():
                rows[rank, start:end] = self._open(half, own.dtype)[rank, : end - start]
        self._meet(group)

    def exchange(self, parts: Tensor, group: ProcessGroup) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Row r of `parts` (ranks, n) goes to rank r. Yields (start, end, what each rank sent of start..end), in order.

        What is yielded stays until the next one is asked for.
        """
        width = HALF // parts.itemsize // self._ranks
        for half, start, end in self._chunks(parts.shape[1], width):
            boxes = self._open(half, parts.dtype)[:, : width * self._ranks].view(self._ranks, self._ranks, width)
            for rank in self._others():
                boxes[self._rank, rank, : end - start] = parts[rank, start:end]
            self._meet(group)
            own = parts[self._rank, start:end]
            yield (
                start,
                end,
                [own if rank == self._rank else boxes[rank, self._rank, : end - start] for rank in range(self._ranks)],
            )
        self._meet(group)

    def _meet(self, group: ProcessGroup) -> None:
        """Wait until every rank is here."""
        if self._meeting is None:
            dist.meet(group)
        else:
            self._meeting.meet()

    def _chunks(self, numbers: int, width: int) -> Iterator[tuple[int, int, int]]:
        """(half, start, end)."""
        for index, start in enumerate(range(0, numbers, width)):
            yield index % 2, start, min(start + width, numbers)

    def _open(self, half: int, dtype: torch.dtype) -> Tensor:
        """(ranks, numbers of a half)."""
        return self._boxes[:, half].view(dtype)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]


def of_world() -> Mailbox | None:
    """The mailbox of all ranks; None where they are on several hosts, or on GPUs. Collective when first asked."""
    return dist.once("mailbox", _make)


def _make() -> Mailbox | None:
    world = dist.world()
    if world.size == 1 or world.device.type != "cpu":
        return None
    boxes = 2 * HALF * world.size
    memory = shared_memory.share(boxes + LINE * world.size)
    if memory is None:
        return None
    processes = dist.gather_objects(os.getpid())
    meeting = Meeting(memory[boxes:], world.rank, processes) if writes_in_order() else None
    return Mailbox(memory[:boxes], world.rank, world.size, meeting)
