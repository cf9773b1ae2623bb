"""The conversations of SFT as batches, and the held-out loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from engine import Engine
from pipeline.data.batch import TokenBatch, batch_indices, collate_tokens, pack_tokens
from pipeline.data.encode import TokenItem
from pipeline.data.microbatches import largest_microbatch, local_microbatches
from pipeline.distributed import sum_over_ranks
from pipeline.stages.supervised import StepBatch


@dataclass(frozen=True)
class SftBatches:
    """The conversations of SFT as batches. `packing`: a micro-batch is one row without padding."""

    items: Sequence[TokenItem]
    batch_size: int
    seed: int
    packing: bool
    pad_id: int

    def step(self, step: int, budget: int) -> StepBatch[TokenBatch]:
        """Return the batch of a step, counted from 0; the loss runs over its target tokens."""
        items = [self.items[i] for i in batch_indices(len(self.items), self.batch_size, self.seed, step)]
        batches, count = micro_batches(items, budget=budget, packing=self.packing, pad_id=self.pad_id)
        return StepBatch(batches, count, sum(len(item.ids) for item in items))

    def largest_microbatch(self, budget: int) -> TokenBatch:
        """Return the largest micro-batch that a step can have."""
        collate, lengths = _collate(self.packing, self.pad_id), [len(item.ids) for item in self.items]
        return largest_microbatch(self.items, lengths, collate, budget=budget, packing=self.packing)

    def evaluate(self, engine: Engine, held_out: Sequence[TokenItem], budget: int) -> dict[str, float]:
        """Return the mean loss of held-out conversations, in nats per token; nothing if none are held out."""
        if not held_out:
            return {}
        loss = held_out_loss(engine, held_out, budget=budget, packing=self.packing, pad_id=self.pad_id)
        return {"eval_loss": loss}


def micro_batches(
    items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[TokenBatch], int]:
    """Return this rank's micro-batches of a global batch, and the number of target tokens of the global batch."""
    collate, lengths = _collate(packing, pad_id), [len(item.ids) for item in items]
    batches, _ = local_microbatches(items, lengths, collate, budget=budget, packing=packing)
    return batches, sum(int(item.counts[1:].sum()) for item in items)


def held_out_loss(engine: Engine, items: Sequence[TokenItem], *, budget: int, packing: bool, pad_id: int) -> float:
    """Return the mean cross-entropy per target token, in nats; nan without target tokens."""
    batches, count = micro_batches(items, budget=budget, packing=packing, pad_id=pad_id)

    def loss(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
        logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
        return [-logprobs.double().sum()]

    total = sum((part.item() for losses in engine.score(batches, loss) for part in losses), 0.0)
    return sum_over_ranks(total) / count if count else float("nan")


def _collate(packing: bool, pad_id: int) -> Callable[[Sequence[TokenItem]], TokenBatch]:
    make = pack_tokens if packing else collate_tokens
    return lambda items: make(items, pad_id)
