"""A step's conversations as this rank's micro-batches."""

from collections.abc import Sequence

from engine.parallel import dist
from pipeline.data.batch import TokenBatch, collate_tokens, pack_tokens, plan
from pipeline.data.encode import TokenItem


def micro_batches(
    items: Sequence[TokenItem], *, budget: int, packing: bool, max_length: int, pad_id: int
) -> tuple[list[TokenBatch], int]:
    """This rank's micro-batches of a global batch, and the number of tokens that count in all of it.

    budget: tokens a micro-batch, padding included; max_length: tokens a packed row.
    """
    world = dist.world()
    planned = plan(
        [len(item.ids) for item in items], ranks=world.size, budget=budget, packing=packing, max_length=max_length
    )[world.rank]
    batches = []
    for places in planned:
        rows = [items[i] for i in places]
        batch = pack_tokens(rows, pad_id, max_length) if packing else collate_tokens(rows, pad_id)
        batches.append(batch.to(world.device))
    return batches, sum(int(item.counts[1:].sum()) for item in items)
