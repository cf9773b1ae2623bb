"""Where each trained parameter's shard stands in flat memory, and the sub-groups that are stepped together.

One flat space for all shards of a rank, in the module's order. Each shard begins on a disk block, so that every kind of
state (masters, moments) has the same layout in memory and in a file, and a sub-group is one range of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

BLOCK = 1024  # fp32 numbers in 4096 bytes: what direct I/O is aligned to


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a flattened shard, at `offset` in its sub-group."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        """Where it is in the sub-group's flat tensors."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class SubGroup:
    """Elements `start` to `stop` of the flat space, both at block borders, with the pieces inside."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """`sizes` elements a shard, `offsets` of the shards, `length` of the flat space."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int
    groups: tuple[SubGroup, ...]

    @property
    def largest(self) -> int:
        """Elements of the largest sub-group."""
        return max((group.size for group in self.groups), default=0)


def lay_out(sizes: Sequence[int], sub_group: int) -> Layout:
    """Cut shards of `sizes` elements into sub-groups of `sub_group` elements (rounded up to whole blocks)."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += whole_blocks(size)
    step = whole_blocks(sub_group)
    borders = [*range(0, end, step), end]
    groups = [SubGroup(start, stop, tuple(_pieces(sizes, offsets, start, stop))) for start, stop in pairwise(borders)]
    return Layout(tuple(sizes), tuple(offsets), end, tuple(groups))


def whole_blocks(elements: int) -> int:
    """Elements rounded up to blocks."""
    return -(-elements // BLOCK) * BLOCK


def _pieces(sizes: Sequence[int], offsets: Sequence[int], start: int, stop: int) -> Iterator[Piece]:
    for index, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        first, last = max(start, offset), min(stop, offset + size)
        if first < last:
            yield Piece(index, first - offset, last - offset, first - start)
