"""A step's pairs as this rank's micro-batches."""

from collections.abc import Callable, Sequence

from engine.healing import Portion
from engine.parallel import dist
from pipeline.data.batch import PairBatch, collate_pairs, pack_pairs, plan, shared_tokens
from pipeline.data.encode import PairItem
from pipeline.data.portions import largest, portion


def longer(pair: PairItem) -> int:
    """Tokens of the longer side."""
    return max(len(pair.chosen), len(pair.rejected))


def together(pair: PairItem) -> int:
    """Tokens of both sides, what they begin with counted once."""
    return len(pair.chosen) + len(pair.rejected) - shared_tokens(pair)


def micro_batches(
    pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[Portion[PairBatch]], list[list[int]]]:
    """This rank's micro-batches of a global batch, and which pairs each holds (places in `pairs`).

    budget: tokens a micro-batch, both sides and padding included; packing: each is one row without padding, in which
    the sides of a pair share what they begin with.
    """
    world = dist.world()
    if packing:
        planned = plan([together(pair) for pair in pairs], ranks=world.data_size, budget=budget, packing=True)
    else:
        lengths, half = [longer(pair) for pair in pairs], max(1, budget // 2)
        planned = plan(lengths, ranks=world.data_size, budget=half, packing=False)
    mine, collate = planned[world.data_rank], _collate(packing=packing, pad_id=pad_id)
    return [portion([pairs[i] for i in places], collate) for places in mine], mine


def largest_batch(pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> Portion[PairBatch]:
    """The largest micro-batch that a step over some of `pairs` can have."""
    size, tokens = (together, budget) if packing else (longer, max(1, budget // 2))
    lengths = [size(pair) for pair in pairs]
    return largest(pairs, lengths, tokens, _collate(packing=packing, pad_id=pad_id), packing=packing)


def _collate(*, packing: bool, pad_id: int) -> Callable[[Sequence[PairItem]], PairBatch]:
    lay_out, device = pack_pairs if packing else collate_pairs, dist.world().device
    return lambda chosen: lay_out(chosen, pad_id).to(device)
