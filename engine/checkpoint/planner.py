"""The tensors of a rank in the form that `torch.distributed.checkpoint` saves and loads: named chunks.

DCP's own planners take a DTensor as one chunk. Here a rank may hold several chunks of a tensor (experts whose gate and
up matrices share one, engine/parallel/tensor.py), and a state may be on NVMe instead of in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import AsyncStager

from engine.loading import local_region
from engine.parallel import dtensors

TENSORS = "tensors"  # the one key of a state dict: DCP writes log records for each key


@dataclass(frozen=True)
class LocalChunks:
    """This rank's chunks of a tensor that is sharded like `layout`.

    `read` returns this rank's values, in the shape of the local tensor. `write` stores changed values again; None if
    `read` returns the memory itself.
    """

    layout: Tensor
    dtype: torch.dtype
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None] | None = None

    def views(self, local: Tensor) -> dict[torch.Size, Tensor]:
        """Return the chunks of a local tensor by their offsets in the full tensor, without empty ones."""
        region = local_region(self.layout)
        start = [slices[0].start for slices in region]
        chunks = {torch.Size(start): local}
        for dim, slices in enumerate(region):
            if len(slices) > 1:
                starts = (torch.Size([*start[:dim], rows.start, *start[dim + 1 :]]) for rows in slices)
                chunks = dict(zip(starts, local.chunk(len(slices), dim), strict=True))
        return {offsets: chunk for offsets, chunk in chunks.items() if chunk.numel() or not self.layout.numel()}

    def extents(self) -> list[ChunkStorageMetadata]:
        """Return offsets and sizes of the chunks."""
        shape = dtensors.local(self.layout)
        return [ChunkStorageMetadata(offsets, chunk.size()) for offsets, chunk in self.views(shape).items()]

    def copied(self) -> "LocalChunks":
        """Return the same chunks with a copy of their values in host memory, pinned for a copy from a GPU."""
        live = self.read().detach()
        copy = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
        copy.copy_(live, non_blocking=True)
        return replace(self, read=lambda: copy)


def in_memory(tensor: Tensor) -> LocalChunks:
    """Return the chunks of a tensor or DTensor."""
    return LocalChunks(tensor, tensor.dtype, lambda: dtensors.local(tensor))


class HostCopy(AsyncStager):
    """Copies all chunks into host memory. Training may change the originals when `stage` returns."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copies = {name: chunks.copied() for name, chunks in state_dict[TENSORS].items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {TENSORS: copies}

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns after the copy."""

    def close(self) -> None:
        """Do nothing: the copies are freed when they are written."""


class NoCopy(HostCopy):
    """Leaves the chunks where they are. Training must wait until they are written."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class ChunkSavePlanner(DefaultSavePlanner):
    """Plans the writing of a state dict {TENSORS: {name: LocalChunks}}. DCP removes chunks that several ranks hold."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict[TENSORS], is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, chunks in self.state_dict.items() for item in _write_items(name, chunks)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _chunk(self.state_dict[index.fqn], index)


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of such a state dict from a checkpoint with any other division into chunks."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict[TENSORS], metadata, is_coordinator
        self._open: dict[str, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, chunks in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, chunks.extents())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        chunks = self.state_dict[index.fqn]
        local = self._open[index.fqn] = chunks.read()
        return chunks.views(local)[index.offset]  # type: ignore[index]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        local, write = self._open.pop(name), self.state_dict[name].write
        if write is not None:
            write(local)


def _chunk(chunks: LocalChunks, index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return chunks.views(chunks.read().detach())[index.offset]


def _write_items(name: str, chunks: LocalChunks) -> list[WriteItem]:
    properties = TensorProperties(dtype=chunks.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=chunks.layout.size()),
        )
        for chunk in chunks.extents()
    ]
