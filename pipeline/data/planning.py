"""How a global batch is cut: over the ranks evenly by tokens, and on each rank into micro-batches of a token budget.

Every rank gets the same number of micro-batches, since each forward and backward pass has collectives in it. All of
it is deterministic, so every rank works the plan out by itself.
"""

import heapq
from collections.abc import Sequence

MicroBatch = list[int]  # indices of its examples, the longest first


def plan(lengths: Sequence[int], *, ranks: int, budget: int, packing: bool, minimum: int = 1) -> list[list[MicroBatch]]:
    """rank -> micro-batch -> indices into `lengths`, each index once.

    budget: tokens a micro-batch, padding included; an example above it goes alone
    packing: the examples of a micro-batch stand in one row without padding, rather than in a row each
    minimum: micro-batches of each rank at least (a pipeline works on as many at once as it has stages)

    Micro-batches run from the largest to the smallest, so that ranks do equal work at the same time. Empty ones stand
    at the end, only where a rank has too few examples. For padded pairs give the longer sides' lengths and half the
    budget.
    """
    cuts = []
    for share in _shares(lengths, ranks):
        mine = [lengths[index] for index in share]
        cut = _even(mine, budget) if packing else _alike(mine, budget)
        cuts.append([[share[place] for place in batch] for batch in cut])
    count = max(minimum, *(len(cut) for cut in cuts))
    return [_with_count(cut, count, lengths, packing=packing) for cut in cuts]


def _shares(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices in `parts` parts of about equal length: the longest first, each to the part with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, 0, part) for part in range(parts)]  # tokens, examples, part
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, examples, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (tokens + lengths[index], examples + 1, part))
    return shares


def _even(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens, as few as first fit makes, of about equally many where that works."""
    filled = _filled(lengths, budget)
    even = _shares(lengths, len(filled))
    works = all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in even)
    return even if works else filled


def _filled(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens, first fit decreasing; an example above it goes alone."""
    batches: list[MicroBatch] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((batch for batch, room in enumerate(free) if room >= lengths[index]), None)
        if place is None:
            place = len(batches)
            batches.append([])
            free.append(budget)
        batches[place].append(index)
        free[place] -= lengths[index]
    return batches


def _alike(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Examples of similar length together, as many as the budget takes with all padded to the longest."""
    batches: list[MicroBatch] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def _with_count(batches: list[MicroBatch], count: int, lengths: Sequence[int], *, packing: bool) -> list[MicroBatch]:
    """`count` micro-batches, the costliest first: the costliest that can be are halved until there are enough."""

    def cost(batch: MicroBatch) -> int:
        inside = [lengths[index] for index in batch]
        return sum(inside) if packing else len(inside) * max(inside, default=0)

    while len(batches) < count:
        widest = max((batch for batch in batches if len(batch) > 1), key=cost, default=None)
        if widest is None:
            return sorted(batches, key=cost, reverse=True) + [[] for _ in range(count - len(batches))]
        batches = [batch for batch in batches if batch is not widest]
        middle = len(widest) // 2
        batches += [widest[::2], widest[1::2]] if packing else [widest[:middle], widest[middle:]]
    return sorted(batches, key=cost, reverse=True)
