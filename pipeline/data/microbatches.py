"""Divide a global batch over the ranks evenly by tokens, and on each rank into micro-batches; gather their results.

A micro-batch has at most `budget` tokens, padding included. Every rank gets the same number of micro-batches, because
each forward and backward pass contains collectives. The division is deterministic, so every rank computes it itself.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine import Engine, distributed
from pipeline.data.batch import Movable, TokenBatch, shared_tokens, token_batch
from pipeline.data.encode import PairItem, TokenItem

MAX_ITEMS = 1024  # of the longest items that `largest_microbatch` considers

MicroBatch = list[int]  # indices of its examples, the longest first
Batch = TypeVar("Batch", bound=Movable)
Item = TypeVar("Item")
Result = TypeVar("Result")


def local_microbatches(
    items: Sequence[Item],
    lengths: Sequence[int],
    collate: Callable[[Sequence[Item]], Batch],
    *,
    budget: int,
    packing: bool,
) -> tuple[list[Batch], list[MicroBatch]]:
    """Return this rank's micro-batches of a global batch, on its device, and the indices into `items` of each.

    lengths: tokens of each item
    collate: makes the tensors; without items it makes a batch in which nothing counts
    packing: a micro-batch is one row without padding
    """
    world = distributed.world()
    by_rank = divide_batch(lengths, ranks=world.data_size, budget=budget, packing=packing, minimum=world.pipeline)
    indices = by_rank[world.data_rank]
    return [collate([items[i] for i in microbatch]).to(world.device) for microbatch in indices], indices


def largest_microbatch(
    items: Sequence[Any],
    lengths: Sequence[int],
    collate: Callable[[Sequence[Any]], Batch],
    *,
    budget: int,
    packing: bool,
) -> Batch:
    """Return the largest micro-batch that a step over some of `items` can have, on this rank's device."""
    order = sorted(range(len(items)), key=lambda index: -lengths[index])[:MAX_ITEMS]
    first = divide_batch([lengths[index] for index in order], ranks=1, budget=budget, packing=packing)[0][0]
    return collate([items[order[index]] for index in first]).to(distributed.world().device)


def token_microbatches(
    items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[TokenBatch], int]:
    """Return this rank's micro-batches of conversations, and the number of target tokens of the global batch."""
    lengths = [len(item.ids) for item in items]
    collate = partial(token_batch, pad_id=pad_id, packing=packing)
    batches, _ = local_microbatches(items, lengths, collate, budget=budget, packing=packing)
    return batches, sum(int(item.counts[1:].sum()) for item in items)


def largest_share(count: int) -> int:
    """Return the largest number of `count` equal items that a rank gets."""
    return -(-count // distributed.world().data_size)


def gather_by_index(results: Mapping[int, Result]) -> list[Result]:
    """Return the results of all ranks in the order of their indices 0, 1, ..., on every rank. Every rank calls.

    Ranks with the same share of the data must pass equal results.
    """
    gathered = {index: result for local in distributed.gather_objects(results) for index, result in local.items()}
    return [gathered[index] for index in range(len(gathered))]


def score_items(
    engine: Engine,
    batches: Sequence[Batch],
    indices: Sequence[MicroBatch],
    work: Callable[[nn.Module, Batch], Sequence[Tensor]],
) -> list[Any]:
    """Return the numbers of each item of a global batch as a (nested) list, on every rank. The ranks share the work.

    batches, indices: the result of `local_microbatches`
    work: (module, micro-batch) -> one tensor for each of its items
    """
    local: dict[int, Any] = {}
    for microbatch, results in zip(indices, engine.score(batches, work), strict=True):
        local |= {index: result.tolist() for index, result in zip(microbatch, results, strict=True)}
    return gather_by_index(local)


def gather_rows(rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the fp32 tensors (n,) of all ranks by index, on every rank and on the host.

    Every rank calls. It sends one tensor, because the pickle of a view contains the memory of the whole tensor.
    """
    own = torch.cat([torch.empty(0), *rows.values()])
    gathered: dict[int, Tensor] = {}
    for sizes, values in distributed.gather_objects(({index: len(row) for index, row in rows.items()}, own)):
        gathered |= dict(zip(sizes, values.split(list(sizes.values())), strict=True))
    return gathered


def padded_length(pair: PairItem) -> int:
    """Return the number of tokens of a pair in padded rows: both rows are as long as its longer side."""
    return 2 * max(len(pair.chosen), len(pair.rejected))


def pair_lengths(
    pairs: Sequence[PairItem], *, packing: bool, shared: Callable[[PairItem], int] = shared_tokens
) -> list[int]:
    """Return the number of tokens of each pair. In a packed row the `shared` tokens of both sides count once."""
    if packing:
        return [len(pair.chosen) + len(pair.rejected) - shared(pair) for pair in pairs]
    return [padded_length(pair) for pair in pairs]


def divide_batch(
    lengths: Sequence[int], *, ranks: int, budget: int, packing: bool, minimum: int = 1
) -> list[list[MicroBatch]]:
    """Return rank -> micro-batch -> indices into `lengths`, each index once.

    An example longer than `budget` has a micro-batch of its own. Every rank gets at least `minimum` micro-batches
    (under pipeline parallelism, one for each pipeline rank). They run from the largest to the smallest, so that ranks
    do equal work at the same time. Empty micro-batches are at the end, and only if a rank has too few examples.
    """
    cuts = []
    for share in _shares(lengths, ranks):
        own = [lengths[index] for index in share]
        cut = _packed(own, budget) if packing else _padded(own, budget)
        cuts.append([[share[index] for index in batch] for batch in cut])
    count = max(minimum, *(len(cut) for cut in cuts))
    return [_with_count(cut, count, lengths, packing=packing) for cut in cuts]


def _shares(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices in `count` shares of about equal length: the longest go first, each to the smallest share."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, 0, share) for share in range(count)]  # tokens, examples, share
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, examples, share = heapq.heappop(loads)
        shares[share].append(index)
        heapq.heappush(loads, (tokens + lengths[index], examples + 1, share))
    return shares


def _packed(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Return as few micro-batches as first fit needs, with about equal numbers of tokens if such a division fits."""
    filled = _first_fit(lengths, budget)
    even = _shares(lengths, len(filled))
    fits = all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in even)
    return even if fits else filled


def _first_fit(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Return micro-batches by first fit decreasing."""
    batches: list[MicroBatch] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        chosen = next((batch for batch, tokens in enumerate(free) if tokens >= lengths[index]), None)
        if chosen is None:
            chosen = len(batches)
            batches.append([])
            free.append(budget)
        batches[chosen].append(index)
        free[chosen] -= lengths[index]
    return batches


def _padded(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Return micro-batches of examples of similar length, which are padded to the longest of each."""
    batches: list[MicroBatch] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def _with_count(batches: list[MicroBatch], count: int, lengths: Sequence[int], *, packing: bool) -> list[MicroBatch]:
    """Return `count` micro-batches, the largest first, by halving the largest ones that have two examples."""

    def tokens(batch: MicroBatch) -> int:
        own = [lengths[index] for index in batch]
        return sum(own) if packing else len(own) * max(own, default=0)

    while len(batches) < count:
        largest = max((batch for batch in batches if len(batch) > 1), key=tokens, default=None)
        if largest is None:
            return sorted(batches, key=tokens, reverse=True) + [[] for _ in range(count - len(batches))]
        batches = [batch for batch in batches if batch is not largest]
        middle = len(largest) // 2
        batches += [largest[::2], largest[1::2]] if packing else [largest[:middle], largest[middle:]]
    return sorted(batches, key=tokens, reverse=True)
