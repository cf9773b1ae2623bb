"""A step's pairs as this rank's micro-batches."""

from collections.abc import Sequence

from engine.parallel import dist
from pipeline.data.batch import PairBatch, collate_pairs, plan
from pipeline.data.encode import PairItem


def longer(pair: PairItem) -> int:
    """Tokens of the longer side."""
    return max(len(pair.chosen), len(pair.rejected))


def micro_batches(pairs: Sequence[PairItem], *, budget: int, pad_id: int) -> tuple[list[PairBatch], list[list[int]]]:
    """This rank's micro-batches of a global batch, and which pairs each holds (places in `pairs`).

    budget: tokens a micro-batch, both sides and padding included.
    """
    world = dist.world()
    lengths = [longer(pair) for pair in pairs]
    planned = plan(lengths, ranks=world.size, budget=max(1, budget // 2), packing=False, max_length=max(lengths))
    mine = planned[world.rank]
    return [collate_pairs([pairs[i] for i in places], pad_id).to(world.device) for places in mine], mine
