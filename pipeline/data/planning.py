"""How a global batch is cut: over the ranks evenly by tokens, and on each rank into micro-batches of a token budget.

Every rank gets the same number of micro-batches, since each forward and backward pass has collectives in it. All of
it is deterministic, so every rank works the plan out by itself.
"""

import heapq
from collections.abc import Sequence

Row = list[int]  # indices of the examples that share a row


def plan(lengths: Sequence[int], *, ranks: int, budget: int, packing: bool, max_length: int) -> list[list[list[int]]]:
    """rank -> micro-batch -> indices into `lengths`, each index once.

    budget: tokens a micro-batch, padding included (rows x longest row); an example above it goes alone
    packing: several examples share a row of up to `max_length` tokens (`pack_tokens` lays the same rows)

    Micro-batches run from the largest to the smallest, so that ranks do equal work at the same time. Empty ones stand
    at the end, only where a rank has too few examples. For pairs give the longer side's lengths and half the budget.
    """
    cuts = []
    for share in _shares(lengths, ranks):
        if packing:
            packed = packed_rows([lengths[index] for index in share], min(max_length, budget))
            rows = [[share[place] for place in row] for row in packed]
        else:
            rows = [[index] for index in share]
        cuts.append(_micro_batches(rows, lengths, budget))
    count = max(len(cut) for cut in cuts)
    return [_with_count(cut, count, lengths) for cut in cuts]


def packed_rows(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Indices into rows of at most `capacity` tokens, first fit decreasing; an example above it has its own row.

    Some of the rows, packed again without the others, come out the same.
    """
    rows: list[Row] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((row for row, room in enumerate(free) if room >= lengths[index]), None)
        if place is None:
            place = len(rows)
            rows.append([])
            free.append(capacity)
        rows[place].append(index)
        free[place] -= lengths[index]
    return rows


def _shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices a rank: the longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]  # tokens, examples, rank
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, examples, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (tokens + lengths[index], examples + 1, rank))
    return shares


def _tokens(row: Row, lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in row)


def _micro_batches(rows: list[Row], lengths: Sequence[int], budget: int) -> list[list[Row]]:
    """Rows of similar length together, as many as the budget takes."""
    batches: list[list[Row]] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -_tokens(row, lengths)):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = _tokens(row, lengths)
        batches[-1].append(row)
    return batches


def _with_count(batches: list[list[Row]], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """`count` micro-batches as indices: the largest are halved until there are enough, by rows and then within rows."""
    while len(batches) < count:
        widest = max(batches, key=lambda rows: (len(rows), sum(len(row) for row in rows)), default=[])
        halves = _halves(widest)
        if halves is None:
            batches = [*batches, []]
            continue
        place = next(i for i, rows in enumerate(batches) if rows is widest)
        batches = [*batches[:place], *halves, *batches[place + 1 :]]
    cost = {id(rows): len(rows) * max((_tokens(row, lengths) for row in rows), default=0) for rows in batches}
    ordered = sorted(batches, key=lambda rows: -cost[id(rows)])
    return [[index for row in rows for index in row] for rows in ordered]


def _halves(rows: list[Row]) -> tuple[list[Row], list[Row]] | None:
    if len(rows) > 1:
        return rows[: len(rows) // 2], rows[len(rows) // 2 :]
    if rows and len(rows[0]) > 1:
        middle = len(rows[0]) // 2
        return [rows[0][:middle]], [rows[0][middle:]]
    return None
