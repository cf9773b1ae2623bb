"""A step's conversations as this rank's micro-batches."""

from collections.abc import Sequence

from engine.healing import Portion
from engine.parallel import dist
from pipeline.data.batch import TokenBatch, collate_tokens, pack_tokens, plan
from pipeline.data.encode import TokenItem
from pipeline.data.portions import portion


def micro_batches(
    items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[Portion[TokenBatch]], int]:
    """This rank's micro-batches of a global batch, and the number of tokens that count in all of it.

    budget: tokens a micro-batch, padding included; packing: each is one row without padding.
    """
    world = dist.world()
    lengths = [len(item.ids) for item in items]
    planned = plan(lengths, ranks=world.data_size, budget=budget, packing=packing)[world.data_rank]
    lay_out = pack_tokens if packing else collate_tokens

    def collate(chosen: Sequence[TokenItem]) -> TokenBatch:
        return lay_out(chosen, pad_id).to(world.device)

    batches = [portion([items[i] for i in places], collate) for places in planned]
    return batches, sum(int(item.counts[1:].sum()) for item in items)
