"""Offloaded states in checkpoints: those in memory are tensors like any other, those in files go one at a time.

`torch.distributed.checkpoint` asks a planner for the data of each item as it writes it, and for a place as it reads it.
For a state in a file the state dict has a stand-in without memory, and the planner reads or writes the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem

from engine.checkpoint.chunks import chunk_at
from engine.offload.optimizer import OffloadedOptimizer
from engine.offload.stores import FileStore
from engine.offload.tier import Tier
from engine.parallel import dtensors


@dataclass(frozen=True)
class Filed:
    """One state of one shard in a file."""

    tier: Tier
    shard: int
    kind: str

    @property
    def parameter(self) -> Tensor:
        return self.tier.shards[self.shard].parameter.detach()

    @property
    def shape(self) -> torch.Size:
        return dtensors.local(self.parameter).shape

    def read(self) -> Tensor:
        return self.tier.store.read(self.kind, self.shard).view(self.shape)

    def write(self, values: Tensor) -> None:
        self.tier.store.write(self.kind, self.shard, values)


def tensors(optimizer: OffloadedOptimizer) -> tuple[dict[str, Tensor], dict[str, Filed]]:
    """All states by kind.name, laid out like their parameters; and which of them are stand-ins for states in files."""
    found: dict[str, Tensor] = {}
    filed: dict[str, Filed] = {}
    for name, tier, number, kind in optimizer.states():
        parameter = tier.shards[number].parameter
        if isinstance(tier.store, FileStore):
            filed[name] = Filed(tier, number, kind)
            part = torch.zeros(()).expand(tier.store.layout.sizes[number])
        else:
            part = tier.store.read(kind, number)
        found[name] = dtensors.laid_out_like(parameter.detach(), part)
    return found, filed


class SavePlanner(DefaultSavePlanner):
    """Reads states from their files when they are written."""

    def __init__(self, filed: Mapping[str, Filed]) -> None:
        super().__init__()
        self._filed = filed

    def resolve_data(self, write_item: WriteItem) -> object:  # type: ignore[override]
        place = self._filed.get(write_item.index.fqn)
        if place is None:
            return super().resolve_data(write_item)
        return chunk_at(place.parameter, place.read(), write_item.index.offset)


class LoadPlanner(DefaultLoadPlanner):
    """Writes states into their files as they are read."""

    def __init__(self, filed: Mapping[str, Filed]) -> None:
        super().__init__()
        self._filed = filed
        self._open: dict[str, Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.type == LoadItemType.TENSOR
        name = read_item.dest_index.fqn
        if name not in self._filed:
            return super().resolve_tensor(read_item)
        whole = self._open[name] = self._filed[name].read()
        part = chunk_at(self._filed[name].parameter, whole, read_item.dest_index.offset)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        if name in self._open:
            self._filed[name].write(self._open.pop(name))
        else:
            super().commit_tensor(read_item, tensor)
