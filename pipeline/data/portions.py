"""Micro-batches that can be halved where memory runs out: items, and how they are laid side by side."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from engine.healing import Portion
from pipeline.data.planning import plan

MOST_ITEMS = 1024  # of the longest, that a micro-batch may be filled with


class Tokens(Protocol):
    """A micro-batch of token ids."""

    @property
    def input_ids(self) -> Tensor: ...


Batch = TypeVar("Batch", bound=Tokens)


def portion(items: Sequence[Any], collate: Callable[[Sequence[Any]], Batch]) -> Portion[Batch]:
    """`collate` lays items side by side on the device; no items make a batch in which nothing counts."""
    return Portion(items, collate, tokens)


def largest(
    items: Sequence[Any],
    lengths: Sequence[int],
    budget: int,
    collate: Callable[[Sequence[Any]], Batch],
    *,
    packing: bool,
) -> Portion[Batch]:
    """The largest micro-batch that a step can have: the longest items, as many as a budget of tokens takes."""
    order = sorted(range(len(items)), key=lambda place: -lengths[place])[:MOST_ITEMS]
    first = plan([lengths[place] for place in order], ranks=1, budget=budget, packing=packing)[0][0]
    return portion([items[order[place]] for place in first], collate)


def tokens(batch: Tokens) -> int:
    """Tokens of a micro-batch, padding included."""
    return batch.input_ids.numel()
