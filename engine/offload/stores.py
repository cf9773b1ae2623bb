"""Where the fp32 states of offloaded parameters live: in memory (a host's or a device's), or in a file.

A state has a kind: `parameter` (the master), the optimizer's own (`exp_avg`, ...), `average`. Each kind is one flat
region with the layout of all shards. `walk` brings the sub-groups one after another: what is changed in a sub-group's
tensors is kept when the next one is asked for.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from engine.offload.blocks import aligned
from engine.offload.files import PrivateFile, settle
from engine.offload.layout import Layout, SubGroup, whole_blocks

BUFFERS = 4  # sub-groups in memory at once: one steps, two are read ahead, one is written


class Store(Protocol):
    """States by kind. Tensors are fp32 and flat."""

    layout: Layout

    @property
    def kinds(self) -> list[str]:
        """What there is room for."""

    def add(self, kind: str) -> None:
        """Make room for another kind of state."""

    def walk(
        self, groups: Sequence[SubGroup], *, read: Iterable[str], write: Iterable[str]
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Sub-groups in order, with a flat tensor a kind; those of `read` hold values, those of `write` are kept."""

    def read(self, kind: str, shard: int) -> Tensor:
        """All elements of one shard, flat; shares the store's memory where it has some."""

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        """All elements of one shard."""

    def settle(self) -> None:
        """Until everything written is kept. Raises OSError where something is not."""

    @property
    def bytes(self) -> int:
        """What the states take."""


class MemoryStore:
    """States in memory on `device`."""

    def __init__(self, layout: Layout, kinds: Sequence[str], device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._regions: dict[str, Tensor] = {}
        for kind in kinds:
            self.add(kind)

    @property
    def kinds(self) -> list[str]:
        return list(self._regions)

    def add(self, kind: str) -> None:
        length = self.layout.length
        on_host = self.device.type == "cpu"
        self._regions[kind] = aligned(length) if on_host else torch.zeros(length, device=self.device)

    def walk(
        self, groups: Sequence[SubGroup], *, read: Iterable[str], write: Iterable[str]
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        for group in groups:
            yield group, {kind: region[group.start : group.stop] for kind, region in self._regions.items()}

    def read(self, kind: str, shard: int) -> Tensor:
        offset = self.layout.offsets[shard]
        return self._regions[kind][offset : offset + self.layout.sizes[shard]]

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        self.read(kind, shard).view(values.shape).copy_(values.detach())

    def settle(self) -> None:
        pass

    @property
    def bytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())


class FileStore:
    """States in a private file under `folder`: a region a kind, one after another."""

    def __init__(self, layout: Layout, kinds: Sequence[str], folder: str | None) -> None:
        """Raises OSError where there is no room for all of them."""
        self.layout, self.kinds = layout, list(kinds)
        self._file = PrivateFile(folder, len(kinds) * layout.length * 4)
        self._buffers: list[dict[str, Tensor]] = []
        self._written: dict[int, list[Future[None]]] = {}

    def add(self, kind: str) -> None:
        self.settle()
        self._file.grow((len(self.kinds) + 1) * self.layout.length * 4)
        self.kinds.append(kind)
        self._buffers.clear()

    def walk(
        self, groups: Sequence[SubGroup], *, read: Iterable[str], write: Iterable[str]
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Reads run ahead by all buffers but one; the last writes may go on after the end: `settle` waits for them."""
        self.settle()
        read, write = list(read), list(write)
        buffers = self._ring(len(groups))
        upcoming = iter(enumerate(groups))
        waiting: deque[tuple[SubGroup, dict[str, Tensor], list[Future[None]], int]] = deque()
        while True:
            while len(waiting) < max(1, buffers - 1) and (following := next(upcoming, None)) is not None:
                waiting.append(self._fetch(following[1], following[0] % buffers, read))
            if not waiting:
                return
            group, tensors, reading, slot = waiting.popleft()
            settle(reading)
            yield group, tensors
            writes = [self._file.write(tensors[kind], self._at(kind, group.start)) for kind in write]
            self._written[slot] = [future for futures in writes for future in futures]

    def settle(self) -> None:
        """Until everything written is in the file. Raises OSError where something is not."""
        for slot in list(self._written):
            settle(self._written.pop(slot))

    def read(self, kind: str, shard: int) -> Tensor:
        self.settle()
        values = aligned(whole_blocks(self.layout.sizes[shard]))
        settle(self._file.read(values, self._at(kind, self.layout.offsets[shard])))
        return values[: self.layout.sizes[shard]]

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        self.settle()
        flat = aligned(whole_blocks(values.numel()))  # what fills its last block belongs to nobody
        flat[: values.numel()].view(values.shape).copy_(values.detach())
        settle(self._file.write(flat, self._at(kind, self.layout.offsets[shard])))

    @property
    def bytes(self) -> int:
        return self._file.size

    @property
    def buffer_bytes(self) -> int:
        """Host memory that is kept to read and write in."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer.values())

    def _at(self, kind: str, element: int) -> int:
        return 4 * (self.kinds.index(kind) * self.layout.length + element)

    def _ring(self, groups: int) -> int:
        """How many buffers serve a walk; they are made where they are not there yet."""
        wanted = min(BUFFERS, max(1, groups))
        while len(self._buffers) < wanted:
            self._buffers.append({kind: aligned(self.layout.largest) for kind in self.kinds})
        return wanted

    def _fetch(
        self, group: SubGroup, slot: int, read: Sequence[str]
    ) -> tuple[SubGroup, dict[str, Tensor], list["Future[None]"], int]:
        """Begin to read a sub-group into a buffer whose last content is in the file."""
        settle(self._written.pop(slot, []))
        tensors = {kind: tensor[: group.size] for kind, tensor in self._buffers[slot].items()}
        futures = [f for kind in read for f in self._file.read(tensors[kind], self._at(kind, group.start))]
        return group, tensors, futures, slot
