"""A step's conversations as this rank's micro-batches."""

from collections.abc import Callable, Sequence

from engine.parallel import dist
from pipeline.data.batch import TokenBatch, collate_tokens, pack_tokens
from pipeline.data.encode import TokenItem
from pipeline.data.microbatch import largest_microbatch, local_microbatches


def micro_batches(
    items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[TokenBatch], int]:
    """This rank's micro-batches of a global batch, and the number of tokens that count in all of it.

    budget: tokens a micro-batch, padding included; packing: each is one row without padding.
    """
    lengths = [len(item.ids) for item in items]
    collate = _collate(packing=packing, pad_id=pad_id)
    batches, _ = local_microbatches(items, lengths, collate, budget=budget, packing=packing)
    return batches, sum(int(item.counts[1:].sum()) for item in items)


def largest_batch(items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int) -> TokenBatch:
    """The largest micro-batch that a step over some of `items` can have."""
    lengths = [len(item.ids) for item in items]
    collate = _collate(packing=packing, pad_id=pad_id)
    return largest_microbatch(items, lengths, collate, budget=budget, packing=packing)


def _collate(*, packing: bool, pad_id: int) -> Callable[[Sequence[TokenItem]], TokenBatch]:
    lay_out, device = pack_tokens if packing else collate_tokens, dist.world().device
    return lambda chosen: lay_out(chosen, pad_id).to(device)
