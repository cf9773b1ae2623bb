"""Which examples a step takes, how they are spread over ranks and micro-batches, and the tensors they become.

The global batch of a step is a function of (number of examples, batch size, seed, step) alone. How it is cut does
not change an update, since losses are sums that are divided once by the global count. Letters: B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pipeline.data.encode import PairItem, TokenItem
from pipeline.data.planning import packed_rows, plan

__all__ = [
    "PairBatch",
    "TokenBatch",
    "batch_indices",
    "collate_pairs",
    "collate_tokens",
    "epoch_order",
    "pack_tokens",
    "plan",
]


class _Batch:
    """Moves its tensors."""

    def to(self, device: torch.device | str) -> Self:
        moved = {f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}  # type: ignore[arg-type]
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class TokenBatch(_Batch):
    """Right-padded rows, each of one document, or of several where packed.

    input_ids (B, T) long
    score_mask (B, T) bool: True where this token is a target that counts; never the first token of a document
    position_ids (B, T) long: from 0 in every document; 0 in the padding
    document_ids (B, T) long: document of the row, from 0; -1 in the padding. None where rows are not packed
    """

    input_ids: Tensor
    score_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor | None


@dataclass(frozen=True, eq=False)
class PairBatch(_Batch):
    """input_ids (2B, T) long: chosen rows, then rejected rows, right padded; lengths (2B,) long; margins (B,) float.

    A batch of no pairs has two rows of padding, so that a forward pass runs, and B = 0 margins.
    """

    input_ids: Tensor
    lengths: Tensor
    margins: Tensor
    sources: tuple[str, ...]


@lru_cache(maxsize=8)
def epoch_order(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(n), another one each epoch."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(n).tolist())


def batch_indices(n: int, batch_size: int, seed: int, step: int) -> list[int]:
    """The examples of the global batch of `step` (from 0): the epochs' orders, one after another, cut into batches."""
    start = step * batch_size
    return [epoch_order(n, seed, place // n)[place % n] for place in range(start, start + batch_size)]


def collate_tokens(items: Sequence[TokenItem], pad_id: int) -> TokenBatch:
    """One row an item. No items: one row of padding in which nothing counts."""
    return _token_batch([[item] for item in items], pad_id, packed=False)


def pack_tokens(items: Sequence[TokenItem], pad_id: int, max_length: int) -> TokenBatch:
    """Rows of several items, up to `max_length` tokens. No items: one row of padding in which nothing counts."""
    rows = packed_rows([len(item.ids) for item in items], max_length)
    return _token_batch([[items[index] for index in row] for row in rows], pad_id, packed=True)


def collate_pairs(items: Sequence[PairItem], pad_id: int) -> PairBatch:
    """Chosen rows, then rejected rows."""
    rows = [item.chosen for item in items] + [item.rejected for item in items]
    lengths = [len(row) for row in rows] or [1, 1]
    input_ids = torch.full((len(lengths), max(lengths)), pad_id, dtype=torch.long)
    for place, row in enumerate(rows):
        input_ids[place, : len(row)] = _long(row)
    margins = torch.tensor([item.margin for item in items], dtype=torch.float32)
    return PairBatch(input_ids, torch.tensor(lengths), margins, tuple(item.source for item in items))


def _token_batch(rows: Sequence[Sequence[TokenItem]], pad_id: int, *, packed: bool) -> TokenBatch:
    lengths = [sum(len(item.ids) for item in row) for row in rows] or [1]
    shape = (len(lengths), max(lengths))
    input_ids = torch.full(shape, pad_id, dtype=torch.long)
    score_mask = torch.zeros(shape, dtype=torch.bool)
    position_ids = torch.zeros(shape, dtype=torch.long)
    document_ids = torch.full(shape, -1, dtype=torch.long)
    for place, row in enumerate(rows):
        start = 0
        for document, item in enumerate(row):
            span = slice(start, start + len(item.ids))
            input_ids[place, span] = _long(item.ids)
            score_mask[place, span] = torch.as_tensor(np.asarray(item.counts, dtype=np.bool_))
            score_mask[place, start] = False
            position_ids[place, span] = torch.arange(len(item.ids))
            document_ids[place, span] = document
            start = span.stop
    return TokenBatch(input_ids, score_mask, position_ids, document_ids if packed else None)


def _long(ids: Any) -> Tensor:
    return torch.as_tensor(np.asarray(ids, dtype=np.int64))
