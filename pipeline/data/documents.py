"""How the tokens of a row without padding fall into documents.

A document may go on from an earlier one, its prefix: it sees that one's tokens as if they were its own first ones. So
two answers share one pass over their prompt. `pipeline.models.attention` computes attention within them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from engine import kernels
from engine.uploads import uploaded


@dataclass(frozen=True)
class Documents:
    """How the N tokens of a row fall into documents.

    lengths: tokens of each, in order; they sum to N
    prefixes: for each, the place of the earlier document that it goes on from, or None; empty for none at all
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...] = ()

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each document begins in the row."""
        return (0, *accumulate(self.lengths))[:-1]

    def prefix(self, place: int) -> int | None:
        """The document that document `place` goes on from."""
        return self.prefixes[place] if self.prefixes else None

    def seen(self, place: int) -> int:
        """Tokens that the last token of a document sees: the prefix's and the document's own."""
        before = self.prefix(place)
        return self.lengths[place] + (0 if before is None else self.lengths[before])

    def positions(self, device: torch.device) -> Tensor:
        """(1, N) each token's position in its document, the prefix counted."""
        spans = [(self.seen(i) - length, self.seen(i)) for i, length in enumerate(self.lengths)]
        places = torch.cat([torch.arange(first, last) for first, last in spans])[None]
        return uploaded(places, device)

    def filled(self, count: int) -> "Documents":
        """These, and `count` tokens behind them as a document of their own."""
        if not count:
            return self
        return Documents((*self.lengths, count), (*self.prefixes, None) if self.prefixes else ())

    def ends(self) -> list[int]:
        """The place in the row of each document's last token."""
        return [start + length - 1 for start, length in zip(self.starts, self.lengths, strict=True)]

    @cached_property
    def families(self) -> kernels.Families | None:
        """The same for the kernel on CPUs; None where a prefix goes on from another."""
        members: dict[int, list[tuple[int, int]]] = {}
        for place, span in enumerate(zip(self.starts, self.lengths, strict=True)):
            before = self.prefix(place)
            if before is not None and self.prefix(before) is not None:
                return None
            members.setdefault(place if before is None else before, []).append(span)
        return kernels.Families.of(list(members.values()))

    @cached_property
    def _on_device(self) -> "dict[torch.device, Ragged]":
        return {}

    def ragged(self, device: torch.device) -> "Ragged":
        """The same for a variable-length kernel, made once a device."""
        if device not in self._on_device:
            self._on_device[device] = _ragged(self, device)
        return self._on_device[device]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Where queries and keys of each document begin, (documents + 1,) int32 each, and the longest of either.

    keys: (K,) the row's tokens in the order in which documents see them; None where that is the row itself.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor | None


def _ragged(documents: Documents, device: torch.device) -> Ragged:
    places = range(len(documents.lengths))
    seen = [documents.seen(i) for i in places]

    def starts(lengths: Sequence[int]) -> Tensor:
        return uploaded(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)

    keys = None
    if any(documents.prefix(i) is not None for i in places):
        spans = [_span(documents, i) for place in places for i in (documents.prefix(place), place) if i is not None]
        keys = uploaded(torch.cat(spans), device)
    query_starts = starts(documents.lengths)
    return Ragged(query_starts, query_starts if keys is None else starts(seen), max(documents.lengths), max(seen), keys)


def _span(documents: Documents, place: int) -> Tensor:
    return torch.arange(documents.starts[place], documents.starts[place] + documents.lengths[place])
