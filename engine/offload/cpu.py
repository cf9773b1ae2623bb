"""Optimizer states in host memory, or in the memory of the device (`offload_ratio` below 1)."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.offload.direct_io import aligned
from engine.offload.layout import Layout, SubGroup


class MemoryStates:
    """Flat fp32 states by kind ("parameter" is the master weight) in the memory of `device`."""

    def __init__(self, layout: Layout, kinds: Sequence[str], device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._regions: dict[str, Tensor] = {}
        for kind in kinds:
            self.add(kind)

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of state that have memory."""
        return list(self._regions)

    def add(self, kind: str) -> None:
        """Allocate another kind of state."""
        length, on_cpu = self.layout.length, self.device.type == "cpu"
        self._regions[kind] = aligned(length) if on_cpu else torch.zeros(length, device=self.device)

    def iterate(
        self, groups: Sequence[SubGroup], *, read: Iterable[str], write: Iterable[str]
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Yield each sub-group with its flat tensors by kind. All kinds are read and written in place."""
        for group in groups:
            yield group, {kind: region[group.start : group.stop] for kind, region in self._regions.items()}

    def read(self, kind: str, shard: int) -> Tensor:
        """Return the elements of one shard, flat, without a copy."""
        offset = self.layout.offsets[shard]
        return self._regions[kind][offset : offset + self.layout.sizes[shard]]

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        """Replace the elements of one shard."""
        self.read(kind, shard).view(values.shape).copy_(values.detach())

    def wait(self) -> None:
        """Return at once: memory has no pending writes."""

    @property
    def bytes(self) -> int:
        """Return the size of all states."""
        return sum(region.nbytes for region in self._regions.values())
