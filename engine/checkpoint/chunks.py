"""Parameters of which a rank holds several chunks, as `torch.distributed.checkpoint` takes them: chunk by chunk.

Experts whose gate and up matrices lie in one tensor are split in both (engine/parallel/tensor.py). DTensor would tell a
checkpoint of one chunk at the first one's place. These tell of each; a checkpoint asks a tensor for its chunks by the
three methods below, private in torch, the same from 2.11 to 2.13.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from engine.loading import local_region
from engine.parallel import dtensors


def in_chunks(tensor: Tensor) -> bool:
    """Whether this rank's part of the whole is not one block of it."""
    return any(len(parts) > 1 for parts in local_region(tensor))


def telling_its_chunks(tensor: Tensor) -> Tensor:
    """The same tensor, which now tells a checkpoint of its chunks. They share its memory."""
    chunks = _chunks(tensor, dtensors.local(tensor))

    def write_items(name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=tensor.size(),
                ),
            )
            for offsets, part in chunks.items()
        ]

    telling: Any = tensor
    telling.__create_write_items__ = write_items
    telling.__create_chunk_list__ = lambda: [ChunkStorageMetadata(at, part.size()) for at, part in chunks.items()]
    telling.__get_tensor_shard__ = lambda index: chunks[index.offset]
    return tensor


def chunk_at(tensor: Tensor, part: Tensor, offsets: torch.Size | None) -> Tensor:
    """Of `part`, shaped like this rank's part of `tensor`, the chunk at `offsets` in the whole; a view."""
    return _chunks(tensor, part)[torch.Size(offsets)] if offsets is not None and in_chunks(tensor) else part


def _chunks(tensor: Tensor, part: Tensor) -> dict[torch.Size, Tensor]:
    """Views of the local part by their offsets in the whole."""
    region = local_region(tensor)
    (dim,) = (at for at, parts in enumerate(region) if len(parts) > 1)
    views = part.chunk(len(region[dim]), dim)
    starts = [[parts[0].start for parts in region] for _ in views]
    for start, rows in zip(starts, region[dim], strict=True):
        start[dim] = rows.start
    return {torch.Size(start): view for start, view in zip(starts, views, strict=True)}
