"""The pairs of the reward model as batches, and the scores of pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from engine import Engine
from pipeline.data.batch import PairBatch, batch_indices, collate_pairs, pack_pairs
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import (
    largest_microbatch,
    local_microbatches,
    pair_budget,
    pair_lengths,
    score_items,
)
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.stages.supervised import StepBatch
from step2_reward.loss import last_scores

Result = TypeVar("Result")


@dataclass(frozen=True)
class RewardBatches:
    """The pairs of the reward model as batches.

    packing: a micro-batch is one row without padding, in which both answers of a pair share their first tokens
    """

    pairs: Sequence[PairItem]
    batch_size: int
    seed: int
    packing: bool
    pad_id: int

    def step(self, step: int, budget: int) -> StepBatch[PairBatch]:
        """Return the batch of a step, counted from 0; the loss runs over its pairs."""
        pairs = [self.pairs[i] for i in batch_indices(len(self.pairs), self.batch_size, self.seed, step)]
        batches, _ = self.divide(local_microbatches, pairs, budget)
        return StepBatch(batches, len(pairs), sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

    def largest_microbatch(self, budget: int) -> PairBatch:
        """Return the largest micro-batch that a step can have."""
        return self.divide(largest_microbatch, self.pairs, budget)

    def divide(self, divide: Callable[..., Result], pairs: Sequence[PairItem], budget: int) -> Result:
        """Return the micro-batches that `divide` makes of pairs."""

        def collate(chosen: Sequence[PairItem]) -> PairBatch:
            return (pack_pairs if self.packing else collate_pairs)(chosen, self.pad_id)

        lengths = pair_lengths(pairs, packing=self.packing)
        return divide(pairs, lengths, collate, budget=pair_budget(budget, packing=self.packing), packing=self.packing)

    def scores(self, engine: Engine, pairs: Sequence[PairItem], budget: int) -> list[Scored]:
        """Return the scores of both answers of each pair, on every rank. The ranks share the work."""
        if not pairs:
            return []
        batches, indices = self.divide(local_microbatches, pairs, budget)
        scores = score_items(engine, batches, indices, _both_scores)
        return [Scored(pair, *both) for pair, both in zip(pairs, scores, strict=True)]

    def evaluate(self, engine: Engine, held_out: Sequence[PairItem], budget: int) -> dict[str, float]:
        """Return the share of held-out pairs that are ranked right; nothing if none are held out."""
        if not held_out:
            return {}
        found = accuracies(self.scores(engine, held_out, budget))
        return {"eval_accuracy": float(found["eval_accuracy"])}  # type: ignore[arg-type]


def _both_scores(module: nn.Module, batch: PairBatch) -> Sequence[Tensor]:
    """Return the scores (2,) of the chosen and the rejected answer of each pair."""
    values, count = module(batch.input_ids, documents=batch.documents), len(batch.margins)
    return last_scores(values, batch.ends)[: 2 * count].view(2, count).unbind(1)
