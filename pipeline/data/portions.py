"""Micro-batches that can be halved where memory runs out: items, and how they are laid side by side."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from engine.healing import Portion


class Tokens(Protocol):
    """A micro-batch of token ids."""

    @property
    def input_ids(self) -> Tensor: ...


Batch = TypeVar("Batch", bound=Tokens)


def portion(items: Sequence[Any], collate: Callable[[Sequence[Any]], Batch]) -> Portion[Batch]:
    """`collate` lays items side by side on the device; no items make a batch in which nothing counts."""
    return Portion(items, collate, tokens)


def tokens(batch: Tokens) -> int:
    """Tokens of a micro-batch, padding included."""
    return batch.input_ids.numel()
