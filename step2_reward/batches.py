"""The pairs of the reward model as batches, and the scores of pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeline.config.stage_sections import RewardSection
from pipeline.data.batch import PairBatch, batch_indices, collate_pairs, pack_pairs
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import (
    largest_microbatch,
    local_microbatches,
    pair_lengths,
    score_items,
)
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.stages.supervised import StepBatch, SupervisedTask
from step2_reward.loss import bradley_terry_loss

Result = TypeVar("Result")


@dataclass(frozen=True)
class RewardBatches(SupervisedTask[PairBatch]):
    """The pairs of the reward model as batches.

    packing: a micro-batch is one row without padding, in which both answers of a pair share their first tokens
    """

    section: RewardSection
    pairs: Sequence[PairItem]
    held_out: Sequence[PairItem]
    seed: int
    packing: bool
    pad_id: int

    best_metric = "eval_accuracy"
    higher_is_better = True

    def step(self, step: int, budget: int) -> StepBatch[PairBatch]:
        pairs = [self.pairs[i] for i in batch_indices(len(self.pairs), self.section.batch_size, self.seed, step)]
        batches, _ = self.divide(local_microbatches, pairs, budget)
        return StepBatch(batches, len(pairs), sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

    def largest_microbatch(self, budget: int) -> PairBatch:
        return self.divide(largest_microbatch, self.pairs, budget)

    def divide(self, divide: Callable[..., Result], pairs: Sequence[PairItem], budget: int) -> Result:
        """Return the micro-batches that `divide` makes of pairs."""

        def collate(chosen: Sequence[PairItem]) -> PairBatch:
            return (pack_pairs if self.packing else collate_pairs)(chosen, self.pad_id)

        lengths = pair_lengths(pairs, packing=self.packing)
        return divide(pairs, lengths, collate, budget=budget, packing=self.packing)

    def loss(self, module: nn.Module, batch: PairBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        """Return the summed loss of a micro-batch, its correct pairs and the sum of its margins."""
        values = module(batch.input_ids, documents=batch.documents)
        scores, count = values.flatten()[batch.ends], len(batch.margins)
        chosen, rejected = scores[:count], scores[count : 2 * count]
        margins = batch.margins if self.section.use_margin else torch.zeros_like(batch.margins)
        difference = (chosen - rejected).detach()
        # A batch without pairs takes part in the collectives of backward, so its loss depends on the scores.
        total = bradley_terry_loss(chosen, rejected, margins, centering=self.section.centering) + 0.0 * scores.sum()
        return total, {"accuracy": (difference > 0).sum(), "margin": difference.sum()}

    def scores(self, pairs: Sequence[PairItem], budget: int) -> list[Scored]:
        """Return the scores of both answers of each pair, on every rank. The ranks share the work."""
        if not pairs:
            return []
        batches, indices = self.divide(local_microbatches, pairs, budget)
        scores = score_items(self.engine, batches, indices, _both_scores)
        return [Scored(pair, *both) for pair, both in zip(pairs, scores, strict=True)]

    def evaluate(self, budget: int) -> dict[str, float]:
        """Return the share of held-out pairs that are ranked right; nothing if none are held out."""
        if not self.held_out:
            return {}
        found = accuracies(self.scores(self.held_out, budget))
        return {"eval_accuracy": float(found["eval_accuracy"])}  # type: ignore[arg-type]


def _both_scores(module: nn.Module, batch: PairBatch) -> Sequence[Tensor]:
    """Return the scores (2,) of the chosen and the rejected answer of each pair."""
    values, count = module(batch.input_ids, documents=batch.documents), len(batch.margins)
    return values.flatten()[batch.ends[: 2 * count]].view(2, count).unbind(1)
