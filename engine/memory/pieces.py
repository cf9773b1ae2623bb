"""The shapes of a pipeline's pieces: what each rank holds of a model (engine/parallel/pipeline), counted on the meta
device.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.memory.shapes import Shape
from engine.parallel import pipeline


@lru_cache(maxsize=8)
def pieces_of(shape: Shape, ranks: int) -> tuple[Shape, ...]:
    """One shape a rank. A tied embedding counts on the first and the last; only the last has a vocabulary.

    Raises ValueError for a model that can't be cut so.
    """
    return tuple(_piece(shape, rank, ranks) for rank in range(ranks))


def _piece(shape: Shape, rank: int, ranks: int) -> Shape:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, attn_implementation=shape.attention)
    for owner in model.modules():  # the way to the first block is found by going it, which takes buffers with numbers
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    piece = pipeline.cut(model, rank=rank, size=ranks, dtype=torch.float32, device=torch.device("meta"))
    blocks = [_count(block) for block in piece.blocks]
    return replace(
        shape,
        parameters=_count(model),
        root=_count(model) - sum(blocks),
        block=max(blocks),
        blocks=len(blocks),
        vocabulary=shape.vocabulary if piece.is_last else 0,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
