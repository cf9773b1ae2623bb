"""Micro-batches of one rank: a step's items, cut by a budget of tokens and laid out on the device."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine import distributed
from pipeline.data.planning import plan

MOST_ITEMS = 1024  # of the longest, that a micro-batch may be filled with

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
    planned = plan(lengths, ranks=world.data_size, budget=budget, packing=packing, minimum=world.pipeline)
    indices = planned[world.data_rank]
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
    first = plan([lengths[index] for index in order], ranks=1, budget=budget, packing=packing)[0][0]
    return collate([items[order[index]] for index in first])
