"""A step's conversations as this rank's micro-batches."""

from collections.abc import Callable, Sequence

from engine.healing import Portion
from engine.parallel import dist
from pipeline.data.batch import TokenBatch, collate_tokens, pack_tokens, plan
from pipeline.data.encode import TokenItem
from pipeline.data.portions import largest, portion


def micro_batches(
    items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[Portion[TokenBatch]], int]:
    """This rank's micro-batches of a global batch, and the number of tokens that count in all of it.

    budget: tokens a micro-batch, padding included; packing: each is one row without padding.
    """
    world = dist.world()
    lengths = [len(item.ids) for item in items]
    planned = plan(lengths, ranks=world.data_size, budget=budget, packing=packing)[world.data_rank]
    collate = _collate(packing=packing, pad_id=pad_id)
    batches = [portion([items[i] for i in places], collate) for places in planned]
    return batches, sum(int(item.counts[1:].sum()) for item in items)


def largest_batch(items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int) -> Portion[TokenBatch]:
    """The largest micro-batch that a step over some of `items` can have."""
    lengths = [len(item.ids) for item in items]
    return largest(items, lengths, budget, _collate(packing=packing, pad_id=pad_id), packing=packing)


def _collate(*, packing: bool, pad_id: int) -> Callable[[Sequence[TokenItem]], TokenBatch]:
    lay_out, device = pack_tokens if packing else collate_tokens, dist.world().device
    return lambda chosen: lay_out(chosen, pad_id).to(device)
