"""Offloaded states in checkpoints: those in memory are tensors like any other, those in files go one at a time.

`torch.distributed.checkpoint` asks a planner for the data of each item as it writes it, and for a place as it reads it.
For a state in a file the state dict has a stand-in without memory, and the planner reads or writes the file.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem

from engine.checkpoint.chunks import chunk_at
from engine.offload.optimizer import OffloadedOptimizer, OffloadedState
from engine.parallel import dtensors


def tensors(optimizer: OffloadedOptimizer) -> tuple[dict[str, Tensor], dict[str, OffloadedState]]:
    """All states by kind.name, laid out like their parameters; and which of them are stand-ins for states in files."""
    found: dict[str, Tensor] = {}
    filed: dict[str, OffloadedState] = {}
    for name, state in optimizer.states().items():
        if not state.in_memory:
            filed[name] = state
        part = state.read() if state.in_memory else torch.zeros(()).expand(dtensors.local(state.parameter).shape)
        found[name] = dtensors.laid_out_like(state.parameter, part.reshape(-1) if state.in_memory else part)
    return found, filed


class SavePlanner(DefaultSavePlanner):
    """Reads states from their files when they are written."""

    def __init__(self, filed: Mapping[str, OffloadedState]) -> None:
        super().__init__()
        self._filed = filed

    def resolve_data(self, write_item: WriteItem) -> object:  # type: ignore[override]
        place = self._filed.get(write_item.index.fqn)
        if place is None:
            return super().resolve_data(write_item)
        return chunk_at(place.parameter, place.read(), write_item.index.offset)


class LoadPlanner(DefaultLoadPlanner):
    """Writes states into their files as they are read."""

    def __init__(self, filed: Mapping[str, OffloadedState]) -> None:
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
