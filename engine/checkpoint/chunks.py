"""This rank's chunks of a tensor, in the form that `torch.distributed.checkpoint` (DCP) saves and loads.

DCP takes a DTensor as one chunk. Here a rank may hold several chunks of a tensor: experts whose gate and up matrices
share one tensor (engine/parallel/tensor.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from engine.loading import local_region
from engine.parallel import dtensors


@dataclass(frozen=True)
class LocalChunks:
    """This rank's `values` of a tensor that is sharded like `layout`."""

    layout: Tensor
    values: Tensor

    @property
    def by_offset(self) -> dict[torch.Size, Tensor]:
        """Return the chunks by their offsets in the full tensor, without empty ones. They are views."""
        region = local_region(self.layout)
        start = [slices[0].start for slices in region]
        chunks = {torch.Size(start): self.values}
        for dim, slices in enumerate(region):
            if len(slices) > 1:
                starts = (torch.Size([*start[:dim], rows.start, *start[dim + 1 :]]) for rows in slices)
                chunks = dict(zip(starts, self.values.chunk(len(slices), dim), strict=True))
        return {offsets: chunk for offsets, chunk in chunks.items() if chunk.numel() or not self.layout.numel()}

    def copy_to_host(self) -> "LocalChunks":
        """Return the same chunks with a copy of the values in host memory, pinned for a copy from a GPU."""
        copy = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)
        copy.copy_(self.values, non_blocking=True)
        return LocalChunks(self.layout, copy)

    # The protocol torch.distributed._checkpointable._Checkpointable, which DTensor implements too.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, chunk.size()) for offsets, chunk in self.by_offset.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=self.values.dtype), self.layout.size()
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.by_offset[index.offset]


def chunks_of(tensor: Tensor) -> LocalChunks:
    """Return the chunks of a tensor or DTensor."""
    return LocalChunks(tensor, dtensors.local(tensor.detach()))


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of {engine: {name: LocalChunks}}. DCP removes chunks that several ranks hold."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of {engine: {name: LocalChunks}} from a checkpoint with any other division into chunks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the names. The method of the base class accepts tensors only."""
        found = ((engine, name, chunks) for engine, tensors in state_dict.items() for name, chunks in tensors.items())
        self.state_dict = {f"{engine}.{name}": chunks for engine, name, chunks in found}
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]
