"""Pairs as this rank's micro-batches: how many tokens each takes, and which stand together."""

from collections.abc import Callable, Sequence

from pipeline.data.batch import shared_tokens
from pipeline.data.encode import PairItem
from pipeline.data.microbatch import Batch, Item, largest_microbatch, local_microbatches


def longer(pair: PairItem) -> int:
    """Tokens of the longer side."""
    return max(len(pair.chosen), len(pair.rejected))


def together(pair: PairItem, shared: Callable[[PairItem], int] = shared_tokens) -> int:
    """Tokens of both sides, those that they share counted once."""
    return len(pair.chosen) + len(pair.rejected) - shared(pair)


def pair_batches(
    items: Sequence[Item],
    sizes: Sequence[int],
    collate: Callable[[Sequence[Item]], Batch],
    *,
    budget: int,
    packing: bool,
) -> tuple[list[Batch], list[list[int]]]:
    """This rank's micro-batches of a global batch, and which items each holds (places in `items`).

    sizes: tokens of each, those of both sides (`together`) where rows are packed, of the longer one elsewhere
    budget: tokens a micro-batch, both sides and padding included
    """
    return local_microbatches(items, sizes, collate, budget=_limit(budget, packing), packing=packing)


def largest_pairs(
    items: Sequence[Item],
    sizes: Sequence[int],
    collate: Callable[[Sequence[Item]], Batch],
    *,
    budget: int,
    packing: bool,
) -> Batch:
    """The largest micro-batch that a step over some of `items` can have; `sizes` as above."""
    return largest_microbatch(items, sizes, collate, budget=_limit(budget, packing), packing=packing)


def _limit(budget: int, packing: bool) -> int:
    """Of `sizes`: where rows are padded each pair has two of the longer side's."""
    return budget if packing else max(1, budget // 2)
