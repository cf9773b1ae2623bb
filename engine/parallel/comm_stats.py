"""Bytes on the wire, counted by what they are for.

What counts is what a rank sends where every byte takes the shortest way: a gather sends its shard to each of the other
ranks, a reduction each of them its part, an all-reduce is both.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor

Kind = Literal["gather", "reduce", "other"]


@dataclass(frozen=True)
class Traffic:
    """Bytes sent: parameters, gradients, all else."""

    gather: int = 0
    reduce: int = 0
    other: int = 0

    def __sub__(self, before: "Traffic") -> "Traffic":
        return Traffic(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.other


_sent = Traffic()


def sent() -> Traffic:
    """What this process has sent since it began."""
    return _sent


def count(kind: Kind, size: int) -> None:
    """Take note of `size` bytes sent."""
    global _sent
    _sent = replace(_sent, **{kind: getattr(_sent, kind) + size})


def count_all_reduce(kind: Kind, tensor: Tensor, ranks: int) -> None:
    """Take note of an all-reduce of a tensor among `ranks`."""
    count(kind, 2 * tensor.nbytes * (ranks - 1) // ranks)
