"""A micro-batch that can be cut: its items, and how they are laid side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


@dataclass(frozen=True, eq=False)
class Portion(Generic[Batch]):
    """Some items of a step, and the micro-batch they make; what is laid out could not be cut, the items can.

    `collate` makes the micro-batch, on the device; of no items it makes one in which nothing counts, as small as a
    forward and backward takes it. `tokens` counts a micro-batch's tokens, padding included: what memory goes with.
    """

    items: Sequence[Any]
    collate: Callable[[Sequence[Any]], Batch]
    tokens: Callable[[Batch], int]

    @cached_property
    def batch(self) -> Batch:
        return self.collate(self.items)

    @cached_property
    def size(self) -> int:
        return self.tokens(self.batch)

    def halves(self) -> "tuple[Portion[Batch], Portion[Batch]] | None":
        """The first and the second half of the items, in order; None where there is nothing left to cut."""
        middle = len(self.items) // 2
        if not middle:
            return None
        return replace(self, items=self.items[:middle]), replace(self, items=self.items[middle:])

    def nothing(self) -> "Portion[Batch]":
        """The micro-batch of no items."""
        return replace(self, items=())
