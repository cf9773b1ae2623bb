"""The flat layout of offloaded states: one address space for all shards of a rank, cut into sub-groups.

Shards follow each other in the module's order, and each shard starts at a disk block. Each kind of state (master
weights, moments, averages) has the same layout in memory and in a file. Direct I/O transfers a sub-group as one range.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

BLOCK = 1024  # fp32 elements in 4096 bytes, the alignment of direct I/O


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of a flattened shard, stored at `offset` in its sub-group."""

    shard: int
    start: int
    stop: int
    offset: int

    @property
    def slice(self) -> slice:
        """The range of the segment in the flat tensors of its sub-group."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class SubGroup:
    """Elements `start` to `stop` of the flat layout, both at block boundaries, and the segments inside."""

    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Sizes and offsets of the shards in elements, the length of the layout, and its sub-groups."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int
    sub_groups: tuple[SubGroup, ...]

    @property
    def largest(self) -> int:
        """Return the number of elements of the largest sub-group."""
        return max((group.size for group in self.sub_groups), default=0)


def flat_layout(sizes: Sequence[int], sub_group_size: int) -> Layout:
    """Cut shards of `sizes` elements into sub-groups of `sub_group_size` elements, rounded up to whole blocks."""
    offsets, length = [], 0
    for size in sizes:
        offsets.append(length)
        length += round_to_blocks(size)
    borders = [*range(0, length, round_to_blocks(sub_group_size)), length]
    groups = (SubGroup(*border, tuple(_segments(sizes, offsets, *border))) for border in pairwise(borders))
    return Layout(tuple(sizes), tuple(offsets), length, tuple(groups))


def round_to_blocks(elements: int) -> int:
    """Round a number of elements up to whole blocks."""
    return -(-elements // BLOCK) * BLOCK


def _segments(sizes: Sequence[int], offsets: Sequence[int], start: int, stop: int) -> Iterator[Segment]:
    for shard, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        first, last = max(start, offset), min(stop, offset + size)
        if first < last:
            yield Segment(shard, first - offset, last - offset, first - start)
