"""Divide a global batch over the ranks evenly by tokens, and each rank's share into micro-batches of a token budget.

Every rank gets the same number of micro-batches, because each forward and backward pass contains collectives. The
division is deterministic, so that every rank computes it without communication.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine import distributed

MOST_ITEMS = 1024  # the largest micro-batch is filled with some of so many longest items
MicroBatch = list[int]  # indices of its examples, the longest first

Batch = TypeVar("Batch")
Item = TypeVar("Item")


def local_microbatches(
    items: Sequence[Item],
    lengths: Sequence[int],
    collate: Callable[[Sequence[Item]], Batch],
    *,
    budget: int,
    packing: bool,
) -> tuple[list[Batch], list[list[int]]]:
    """Return this rank's micro-batches of a global batch, and the indices into `items` of each.

    lengths: tokens of each item
    collate: lays items out on the device; without items it makes a batch in which nothing counts
    budget: tokens of a micro-batch, padding included
    """
    world = distributed.world()
    by_rank = divide_batch(lengths, ranks=world.data_size, budget=budget, packing=packing, minimum=world.pipeline)
    indices = by_rank[world.data_rank]
    return [collate([items[index] for index in chosen]) for chosen in indices], indices


def largest_microbatch(
    items: Sequence[Any],
    lengths: Sequence[int],
    collate: Callable[[Sequence[Any]], Batch],
    *,
    budget: int,
    packing: bool,
) -> Batch:
    """Return the largest micro-batch of a budget of tokens: as many of the longest items as fit."""
    order = sorted(range(len(items)), key=lambda index: -lengths[index])[:MOST_ITEMS]
    first = divide_batch([lengths[index] for index in order], ranks=1, budget=budget, packing=packing)[0][0]
    return collate([items[order[index]] for index in first])


def divide_batch(
    lengths: Sequence[int], *, ranks: int, budget: int, packing: bool, minimum: int = 1
) -> list[list[MicroBatch]]:
    """Return for each rank its micro-batches of indices into `lengths`; each index occurs once.

    budget: tokens of a micro-batch, padding included; a longer example has a micro-batch of its own
    packing: the examples of a micro-batch share one row without padding, instead of one padded row each
    minimum: micro-batches of each rank at least (a pipeline works on as many at once as it has stages)

    Micro-batches are in descending order of size, so that ranks do equal work at the same time. Empty micro-batches
    are last, and exist only if a rank has too few examples. For padded pairs pass the longer sides' lengths and half
    the budget.
    """
    by_rank = []
    for share in _shares(lengths, ranks):
        sizes = [lengths[index] for index in share]
        batches = _even(sizes, budget) if packing else _alike(sizes, budget)
        by_rank.append([[share[index] for index in batch] for batch in batches])
    count = max(minimum, *(len(batches) for batches in by_rank))
    return [_with_count(batches, count, lengths, packing=packing) for batches in by_rank]


def _shares(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Return indices in groups of about equal length: the longest first, each to the group with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(groups)]
    loads = [(0, 0, group) for group in range(groups)]  # tokens, examples, group
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, examples, group = heapq.heappop(loads)
        shares[group].append(index)
        heapq.heappush(loads, (tokens + lengths[index], examples + 1, group))
    return shares


def _even(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Return micro-batches of at most `budget` tokens: as few as first fit needs, of equal size if that is possible."""
    filled = _filled(lengths, budget)
    even = _shares(lengths, len(filled))
    fits = all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in even)
    return even if fits else filled


def _filled(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Return micro-batches of at most `budget` tokens by first fit decreasing; a longer example is alone."""
    batches: list[MicroBatch] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = next((batch for batch, tokens in enumerate(free) if tokens >= lengths[index]), None)
        if target is None:
            target = len(batches)
            batches.append([])
            free.append(budget)
        batches[target].append(index)
        free[target] -= lengths[index]
    return batches


def _alike(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Return micro-batches of examples of similar length, as many as fit if all are padded to the longest."""
    batches: list[MicroBatch] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def _with_count(batches: list[MicroBatch], count: int, lengths: Sequence[int], *, packing: bool) -> list[MicroBatch]:
    """Return `count` micro-batches, the largest first. The largest ones are halved until there are enough."""

    def tokens(batch: MicroBatch) -> int:
        sizes = [lengths[index] for index in batch]
        return sum(sizes) if packing else len(sizes) * max(sizes, default=0)

    while len(batches) < count:
        largest = max((batch for batch in batches if len(batch) > 1), key=tokens, default=None)
        if largest is None:
            return sorted(batches, key=tokens, reverse=True) + [[] for _ in range(count - len(batches))]
        batches = [batch for batch in batches if batch is not largest]
        middle = len(largest) // 2
        batches += [largest[::2], largest[1::2]] if packing else [largest[:middle], largest[middle:]]
    return sorted(batches, key=tokens, reverse=True)
