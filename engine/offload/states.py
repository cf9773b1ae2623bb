"""The fp32 states of a rank's offloaded shards: one flat layout, in memory or in files, cut into sub-groups.

Shards follow each other in the module's order, and each shard starts at a memory page. Each kind of state (master
weights, moments, averages) has the same layout. A step reads, updates and releases one sub-group after another
(ZeRO-Infinity: Rajbhandari et al., 2021, arXiv:2104.07857, section 6.2).
"""

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.host_memory import page_aligned
from engine.offload.scratch_file import ScratchFile, io_threads

FP32_BYTES = 4
BUFFERS = 4  # sub-groups in memory: one is updated, two are read ahead, one is written
PAGE = mmap.PAGESIZE // FP32_BYTES  # elements


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
    """Elements `start` to `stop` of the flat layout, both at page boundaries, and the segments inside."""

    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


class States:
    """Flat fp32 states by kind ("parameter" is the master weight): on `device`, or in scratch files."""

    def __init__(
        self, sizes: Sequence[int], sub_group_size: int, device: torch.device, *, nvme_path: str | None, is_nvme: bool
    ) -> None:
        """`sizes` are the elements of the shards. `sub_group_size` elements are rounded up to whole pages."""
        self.sizes, self.device, self.is_nvme = tuple(sizes), device, is_nvme
        self.offsets: list[int] = []
        self.length = 0
        for size in sizes:
            self.offsets.append(self.length)
            self.length += _whole_pages(size)
        borders = [*range(0, self.length, _whole_pages(sub_group_size)), self.length]
        self.sub_groups = [SubGroup(*border, tuple(self._segments(*border))) for border in pairwise(borders)]
        self.tensors: dict[str, Tensor] = {}
        self._nvme_path = nvme_path
        self._files: dict[str, ScratchFile] = {}
        self._buffers: list[dict[str, Tensor]] = []

    def add(self, kind: str) -> None:
        """Allocate a kind of state, zeros. Every rank calls. Raises OSError on all ranks if the disk of one is full."""
        if self.is_nvme:
            self._buffers.clear()
            self._files[kind] = ScratchFile(self._nvme_path, FP32_BYTES * self.length)
            self.tensors[kind] = self._files[kind].bytes.view(torch.float32)[: self.length]
        else:
            self.tensors[kind] = torch.zeros(self.length, device=self.device)

    def iterate(
        self, groups: Sequence[SubGroup], kinds: Sequence[str], *, store: bool = True
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Yield each sub-group with its flat tensors of these kinds, to be changed in place.

        States in files are read into buffers, and written back with `store`. Raises OSError if that fails.
        """
        if self.is_nvme:
            yield from self._iterate_files(groups, kinds, store=store)
            return
        for group in groups:
            yield group, {kind: self.tensors[kind][group.start : group.stop] for kind in kinds}

    def _iterate_files(
        self, groups: Sequence[SubGroup], kinds: Sequence[str], *, store: bool
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Read ahead and write behind: the disk and the optimizer work at the same time."""
        if not self._buffers:
            self._buffers = [
                {kind: page_aligned(self.largest_sub_group) for kind in self._files} for _ in range(BUFFERS)
            ]
        writes: list[Future[None]] = []

        def states(index: int) -> dict[str, Tensor]:
            return {kind: self._buffers[index % BUFFERS][kind][: groups[index].size] for kind in kinds}

        def read(index: int) -> None:
            if store and index >= BUFFERS:
                writes[index - BUFFERS].result()  # the buffer is free again
            for kind, tensor in states(index).items():
                self._files[kind].read(tensor, FP32_BYTES * groups[index].start)

        def write(index: int) -> None:
            for kind, tensor in states(index).items():
                self._files[kind].write(tensor, FP32_BYTES * groups[index].start)

        reads = [io_threads().submit(read, index) for index in range(min(BUFFERS - 1, len(groups)))]
        for index, group in enumerate(groups):
            reads[index].result()
            yield group, states(index)
            if store:
                writes.append(io_threads().submit(write, index))
            if len(reads) < len(groups):
                reads.append(io_threads().submit(read, len(reads)))
        for pending in writes:
            pending.result()

    def shard(self, kind: str, shard: int) -> Tensor:
        """Return the elements of one shard, flat, without a copy. Those in files are mapped into memory."""
        offset = self.offsets[shard]
        return self.tensors[kind][offset : offset + self.sizes[shard]]

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        """Replace the elements of one shard, and release the memory of those in files."""
        stored, start = self.shard(kind, shard), self.offsets[shard]
        stored.view(values.shape).copy_(values.detach())
        if self.is_nvme:
            self._files[kind].release(FP32_BYTES * start, FP32_BYTES * (start + len(stored)))

    @property
    def largest_sub_group(self) -> int:
        """Return the number of elements of the largest sub-group."""
        return max((group.size for group in self.sub_groups), default=0)

    @property
    def bytes(self) -> int:
        """Return the size of all states in memory or in files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def buffer_bytes(self) -> int:
        """Return the host memory of the buffers of states in files."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer.values())

    def _segments(self, start: int, stop: int) -> Iterator[Segment]:
        for shard, (size, offset) in enumerate(zip(self.sizes, self.offsets, strict=True)):
            first, last = max(start, offset), min(stop, offset + size)
            if first < last:
                yield Segment(shard, first - offset, last - offset, first - start)


def _whole_pages(elements: int) -> int:
    """Round a number of elements up to whole pages."""
    return -(-elements // PAGE) * PAGE
