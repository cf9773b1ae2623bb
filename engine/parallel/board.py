"""The board on which each rank of a tensor or sequence group writes its next collective, in memory that they share: a
rank that failed in the middle of a pass reads there what is left of it.

Such ranks (engine/parallel/tensor.py, sequence.py) sum, gather and exchange inside every block, in shapes that go with
the micro-batch. A rank that runs out of memory in the middle of a pass can't know which of these are left. So each rank
writes down every collective of a pass before it begins it, and a rank that failed reads what its mates write, takes
part with zeros, and is with them at the end. Nobody waits where nothing fails: to write is all there is to it.

Every rank writes one number at each place of a pass: a collective, FAILED, or OVER at the end. One number is one
aligned word, so it is there whole or not at all. The ranks of a group do the same in the same order: so they agree on
places.

Ranks of several hosts share no memory: these send one another the number at each place, and wait for it.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from engine.parallel import dist, shared_memory
from engine.parallel.meeting import Watch

PLACES = 2**16  # of one pass that nobody has read yet; a backend lets no rank be so far ahead
FAILED, OVER, SHARD = 1, 2, 3  # SHARD: a collective of FSDP2, which every rank has noted by itself (replay.py)
SUM, LARGEST, GATHER, EXCHANGE = 4, 5, 6, 7
KINDS = {torch.distributed.ReduceOp.SUM: SUM, torch.distributed.ReduceOp.MAX: LARGEST}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
LAP, GROUP, KIND, DTYPE, NUMBERS = 14, 6, 4, 4, 35  # bits of a word, from the highest
ONLY_LAP = 1


@dataclass(frozen=True)
class Entry:
    """What stands at a place; `group`, `dtype` and `numbers` say what a collective of the group sends."""

    kind: int
    group: int = 0
    dtype: int = 0
    numbers: int = 0

    def take_part(self) -> None:
        """In the collective, with zeros."""
        group, device = dist.groups_of_mates()[self.group], dist.world().device
        zeros = torch.zeros(self.numbers, dtype=DTYPES[self.dtype], device=device)
        if self.kind == GATHER:
            dist.gather_tensors(zeros, group)
        elif self.kind == EXCHANGE:
            dist.all_to_all(torch.empty_like(zeros), zeros, group)
        elif self.kind == LARGEST:
            dist.all_reduce_max(zeros, group)
        else:
            dist.all_reduce_sum(zeros, group)


class Board(Protocol):
    """Where ranks of a group write."""

    def write(self, entry: Entry) -> None:
        """Say what comes next, and go one place on."""

    def follow(self) -> Entry:
        """Say that this rank failed, and go one place on: what a mate does there, or FAILED where none is left.

        Waits for the mates to come to the place. Raises RuntimeError where they don't.
        """


class SharedBoard:
    """The words (ranks of a group, PLACES) int64 of this rank's group. `place` is where this rank is."""

    def __init__(self, memory: Tensor, rank: int, ranks: int, processes: Sequence[int] = ()) -> None:
        """`processes` are the mates' ids: where one of them has ended, nobody waits for it."""
        self._words = memory.view(torch.int64).view(ranks, PLACES).numpy()
        self._own, self._mates = self._words[rank], [each for each in range(ranks) if each != rank]
        self._processes = processes
        self.place = 0

    def write(self, entry: Entry) -> None:
        self._own[self.place % PLACES] = _packed(self._lap(), entry)
        self.place += 1

    def follow(self) -> Entry:
        place, lap, watch = self.place, self._lap(), Watch(self._processes)
        self.write(Entry(FAILED))
        while True:
            found = [_unpacked(int(self._words[mate][place % PLACES]), lap) for mate in self._mates]
            doing = next((entry for entry in found if entry is not None and entry.kind != FAILED), None)
            if doing is not None:
                return doing
            if None not in found:
                return Entry(FAILED)
            watch.look()
            time.sleep(1e-4)

    def _lap(self) -> int:
        return 1 + self.place // PLACES % (2**LAP - 1)  # 0 is memory that nobody wrote to


class SentBoard:
    """Messages among the ranks of this rank's group, one at each place."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        """`group` is of the host, and for nothing else."""
        self._group = group

    def write(self, entry: Entry) -> None:
        self._told(entry)

    def follow(self) -> Entry:
        return next((entry for entry in self._told(Entry(FAILED)) if entry.kind != FAILED), Entry(FAILED))

    def _told(self, entry: Entry) -> list[Entry]:
        """What stands at the place, of all ranks of the group."""
        words = dist.gather_tensors(torch.tensor([_packed(ONLY_LAP, entry)]), self._group)
        return [found for word in words if (found := _unpacked(int(word), ONLY_LAP)) is not None]


def entry_of(function: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Entry:
    """What a call of `torch.distributed` among mates is called on the board."""
    group = next(at for at, each in enumerate(dist.groups_of_mates()) if each is keywords["group"])
    if function in ("all_gather", "all_to_all_single"):
        kind, sent = GATHER if function == "all_gather" else EXCHANGE, arguments[1]
    else:
        assert function == "all_reduce", f"mates don't {function}"
        kind, sent = KINDS[keywords.get("op", torch.distributed.ReduceOp.SUM)], arguments[0]
    return Entry(kind, group, DTYPES.index(sent.dtype), sent.numel())


def of_mates() -> Board:
    """This rank's board. Collective when first asked, of all ranks."""
    return dist.once(f"board of {dist.world().mates}", _make)


def _make() -> Board:
    world = dist.world()
    memory = shared_memory.share(8 * PLACES * world.mates, neighbours=world.mates)
    if memory is None:
        return SentBoard(dist.host_group_of_mates())
    first = world.rank - world.rank % world.mates
    processes = dist.gather_objects(os.getpid())[first : first + world.mates]
    return SharedBoard(memory, world.rank % world.mates, world.mates, processes)


def _packed(lap: int, entry: Entry) -> int:
    word = lap
    for bits, value in ((GROUP, entry.group), (KIND, entry.kind), (DTYPE, entry.dtype), (NUMBERS, entry.numbers)):
        assert value < 2**bits
        word = word << bits | value
    return word


def _unpacked(word: int, lap: int) -> Entry | None:
    """None where nothing was written in this lap."""
    values = []
    for bits in (NUMBERS, DTYPE, KIND, GROUP):
        values.append(word & (2**bits - 1))
        word >>= bits
    numbers, dtype, kind, group = values
    return Entry(kind, group, dtype, numbers) if word == lap else None
