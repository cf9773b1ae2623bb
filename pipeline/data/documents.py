"""The documents of a packed row (a row without padding).

A document may continue an earlier document, its prefix: its tokens attend to the tokens of the prefix. Two answers thus
share one forward pass over their prompt. `pipeline.models.attention` computes attention within documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from engine import distributed, kernels


@dataclass(frozen=True)
class Documents:
    """The division of the N tokens of a row into documents.

    lengths: number of tokens of each document, in order; the sum is N
    prefixes: for each document, the index of its prefix, or None; empty if no document has a prefix
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
    def families(self) -> kernels.Families | None:
        """The documents as input of the CPU kernel; None if a prefix has a prefix itself."""
        members: dict[int, list[tuple[int, int]]] = {}
        for index, span in enumerate(zip(self.starts, self.lengths, strict=True)):
            prefix = self.prefix(index)
            if prefix is not None and self.prefix(prefix) is not None:
                return None
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
