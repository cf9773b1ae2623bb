"""A step's pairs as this rank's micro-batches."""

from collections.abc import Callable, Sequence

from engine.parallel import dist
from pipeline.data.batch import PairBatch, collate_pairs, pack_pairs
from pipeline.data.encode import PairItem
from pipeline.data.pairs import largest_pairs, longer, pair_batches, together


def micro_batches(
    pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[PairBatch], list[list[int]]]:
    """This rank's micro-batches of a global batch, and which pairs each holds (places in `pairs`).

    budget: tokens a micro-batch, both sides and padding included; packing: each is one row without padding, in which
    the sides of a pair share what they begin with.
    """
    collate = _collate(packing=packing, pad_id=pad_id)
    return pair_batches(pairs, _sizes(pairs, packing), collate, budget=budget, packing=packing)


def largest_batch(pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> PairBatch:
    """The largest micro-batch that a step over some of `pairs` can have."""
    collate = _collate(packing=packing, pad_id=pad_id)
    return largest_pairs(pairs, _sizes(pairs, packing), collate, budget=budget, packing=packing)


def _sizes(pairs: Sequence[PairItem], packing: bool) -> list[int]:
    return [together(pair) if packing else longer(pair) for pair in pairs]


def _collate(*, packing: bool, pad_id: int) -> Callable[[Sequence[PairItem]], PairBatch]:
    lay_out, device = pack_pairs if packing else collate_pairs, dist.world().device
    return lambda chosen: lay_out(chosen, pad_id).to(device)
