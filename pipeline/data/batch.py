"""The examples of a step, and the tensors of a micro-batch.

The global batch of a step depends on the number of examples, the batch size, the seed and the step only. Its division
into micro-batches (`microbatches.py`) does not change an update: losses are sums, divided once by the global count.
Letters: B rows, T tokens.

A packed row has no padding and consists of documents. A document may continue an earlier document, its prefix: its
tokens attend to the tokens of the prefix. Two answers thus share one forward pass over their prompt.
`pipeline.models.attention` computes attention within documents.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine import distributed, kernels
from pipeline.data.encode import PairItem, TokenItem


@dataclass
class Documents:
    """The division of the N tokens of a row into documents. No code changes its fields.

    The dataclass is not frozen, because torch.compile of torch 2.11 guards the fields of a frozen argument. Each number
    of documents would then cause another compilation.

    lengths: number of tokens of each document, in order; the sum is N
    prefixes: for each document, the index of its prefix, or None; empty if no document has a prefix. A prefix has no
        prefix itself
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...] = ()

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index in the row of the first token of each document."""
        return (0, *accumulate(self.lengths))[:-1]

    def prefix(self, index: int) -> int | None:
        """Return the index of the prefix of a document, or None."""
        return self.prefixes[index] if self.prefixes else None

    def seen(self, index: int) -> int:
        """Return the number of tokens that the last token of a document attends to, with those of its prefix."""
        prefix = self.prefix(index)
        return self.lengths[index] + (0 if prefix is None else self.lengths[prefix])

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each token in its document, (1, N). Tokens of the prefix count."""
        spans = [(self.seen(i) - length, self.seen(i)) for i, length in enumerate(self.lengths)]
        positions = torch.cat([torch.arange(first, last) for first, last in spans])[None]
        return distributed.to_device(positions, device)

    def filled(self, count: int) -> "Documents":
        """Return these documents followed by one more document of `count` tokens (none if 0)."""
        if not count:
            return self
        return Documents((*self.lengths, count), (*self.prefixes, None) if self.prefixes else ())

    def ends(self) -> list[int]:
        """Return the index in the row of the last token of each document."""
        return [start + length - 1 for start, length in zip(self.starts, self.lengths, strict=True)]

    @cached_property
    def families(self) -> kernels.Families:
        """The documents as input of the CPU kernel."""
        members: dict[int, list[tuple[int, int]]] = {}
        for index, span in enumerate(zip(self.starts, self.lengths, strict=True)):
            prefix = self.prefix(index)
            members.setdefault(index if prefix is None else prefix, []).append(span)
        return kernels.Families.of(list(members.values()))

    @cached_property
    def _on_device(self) -> "dict[torch.device, Ragged]":
        return {}

    def ragged(self, device: torch.device) -> "Ragged":
        """Return the documents as input of a variable-length kernel. The result is cached per device."""
        if device not in self._on_device:
            self._on_device[device] = _ragged(self, device)
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Offsets of the queries and keys of each document, (documents + 1,) int32, and the largest lengths.

    keys: (K,) indices of the key tokens, document by document; None if the keys are the row itself
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor | None


def _ragged(documents: Documents, device: torch.device) -> Ragged:
    indices = range(len(documents.lengths))
    seen = [documents.seen(i) for i in indices]

    def starts(lengths: Sequence[int]) -> Tensor:
        return distributed.to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)

    keys = None
    if any(documents.prefix(i) is not None for i in indices):
        spans = [_span(documents, i) for index in indices for i in (documents.prefix(index), index) if i is not None]
        keys = distributed.to_device(torch.cat(spans), device)
    query_starts = starts(documents.lengths)
    return Ragged(query_starts, query_starts if keys is None else starts(seen), max(documents.lengths), max(seen), keys)


def _span(documents: Documents, index: int) -> Tensor:
    return torch.arange(documents.starts[index], documents.starts[index] + documents.lengths[index])


class Movable:
    """Base of micro-batches: dataclasses with a method that copies their tensors to a device."""

    input_ids: Tensor

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with all tensors on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        moved = {
            name: distributed.to_device(value, device) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class TokenBatch(Movable):
    """Right-padded rows, each of one document, or one row of several documents.

    input_ids (B, T) long
    scored (N,) long: indices of the N target tokens in the flattened ids; never the first token of a document
    documents: the documents of a packed row; None if each document has its own row
    """

    input_ids: Tensor
    scored: Tensor
    documents: Documents | None = None


@dataclass(frozen=True, eq=False)
class PairBatch(Movable):
    """B pairs: right-padded rows, chosen ones and then rejected ones, or one row of documents.

    input_ids (2B, T) or (1, N) long; ends (2B,) long: index of the last token of each side in the flattened ids,
    chosen sides, then rejected sides; margins (B,) float. In a packed row both sides of a pair share a prefix.

    A batch of no pairs has two tokens of padding, so that a forward pass runs, and B = 0 margins.
    """

    input_ids: Tensor
    ends: Tensor
    margins: Tensor
    documents: Documents | None = None


@lru_cache(maxsize=8)
def epoch_order(n: int, seed: int, epoch: int) -> "array[int]":
    """Return a permutation of range(n) that depends on seed and epoch: 8 bytes a number, where a tuple takes 40."""
    return array("q", np.random.default_rng([seed, epoch]).permutation(n).tobytes())


def batch_indices(n: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the indices of the examples in the global batch of `step` (from 0).

    The permutations of all epochs form one sequence, which is cut into batches.
    """
    start = step * batch_size
    return [epoch_order(n, seed, i // n)[i % n] for i in range(start, start + batch_size)]


def lay_out(rows: Sequence[Any], pad_id: int, *, packing: bool) -> tuple[Tensor, list[int], Documents | None]:
    """Return token ids long, the index of the last token of each row in the flattened ids, and the documents.

    The ids are right-padded rows (B, T), or with `packing` one row (1, N) of documents. Without rows they are one
    padding token.
    """
    tensors = [torch.as_tensor(np.asarray(row, dtype=np.int64)) for row in rows] or [torch.tensor([pad_id])]
    lengths = [len(tensor) for tensor in tensors]
    if packing:
        documents = Documents(tuple(lengths))
        return torch.cat(tensors)[None], documents.ends(), documents
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad_id)
    return ids, [row * ids.shape[1] + length - 1 for row, length in enumerate(lengths)], None


def token_batch(items: Sequence[TokenItem], pad_id: int, *, packing: bool) -> TokenBatch:
    """Return a batch of conversations: one packed row, or one padded row per item."""
    ids, ends, documents = lay_out([item.ids for item in items], pad_id, packing=packing)
    scored = [torch.empty(0, dtype=torch.long)]
    for end, item in zip(ends, items, strict=False):  # no token predicts the first one
        scored.append(end + 2 - len(item.ids) + true_indices(torch.as_tensor(item.counts[1:])))
    return TokenBatch(ids, torch.cat(scored), documents)


def shared_tokens(item: PairItem) -> int:
    """Return the length of the common prefix of both sides, which excludes the last token of each side."""
    shorter = min(len(item.chosen), len(item.rejected)) - 1
    different = np.flatnonzero(item.chosen[:shorter] != item.rejected[:shorter])
    return int(different[0]) if len(different) else shorter


def collate_pairs(items: Sequence[PairItem], pad_id: int) -> PairBatch:
    """Return a batch of padded rows: chosen sides, then rejected sides."""
    sides = [item.chosen for item in items] + [item.rejected for item in items]
    ids, ends, _ = lay_out(sides or [[pad_id]] * 2, pad_id, packing=False)
    return PairBatch(ids, torch.tensor(ends), _margins(items))


def pack_pairs(
    items: Sequence[PairItem], pad_id: int, *, shared: Callable[[PairItem], int] = shared_tokens
) -> PairBatch:
    """Return a batch with all pairs in one packed row.

    Each pair has three documents: the common prefix, the remaining chosen tokens and the remaining rejected tokens.
    `shared` returns the length of the prefix, at most `shared_tokens`.
    """
    if not items:
        return PairBatch(torch.tensor([[pad_id, pad_id]]), torch.tensor([0, 1]), _margins([]), Documents((1, 1)))
    parts: list[Any] = []
    prefixes: list[int | None] = []
    sides: list[tuple[int, int]] = []
    for item in items:
        common, first = shared(item), len(parts)
        if common:
            parts.append(item.chosen[:common])
            prefixes.append(None)
        sides.append((len(parts), len(parts) + 1))
        parts += [item.chosen[common:], item.rejected[common:]]
        prefixes += [first if common else None] * 2
    documents = Documents(tuple(len(part) for part in parts), tuple(prefixes))
    ends = torch.tensor(documents.ends())[torch.tensor(sides).T.flatten()]
    return PairBatch(torch.as_tensor(np.concatenate(parts, dtype=np.int64))[None], ends, _margins(items), documents)


def _margins(items: Sequence[PairItem]) -> Tensor:
    return torch.tensor([item.margin for item in items], dtype=torch.float32)


def true_indices(counts: Tensor) -> Tensor:
    """Return the indices (N,) of the True elements of a flattened mask on the CPU (on a GPU, N would need a sync)."""
    return counts.flatten().nonzero().squeeze(1)
