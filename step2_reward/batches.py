"""The pairs of the reward model as batches, and the scores of pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        batches, _ = micro_batches(pairs, budget=budget, packing=self.packing, pad_id=self.pad_id)
        return StepBatch(batches, len(pairs), sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

    def largest_microbatch(self, budget: int) -> PairBatch:
        """Return the largest micro-batch that a step can have."""
        collate, lengths = _collate(self.packing, self.pad_id), pair_lengths(self.pairs, packing=self.packing)
        budget = pair_budget(budget, packing=self.packing)
        return largest_microbatch(self.pairs, lengths, collate, budget=budget, packing=self.packing)

    def scores(self, engine: Engine, pairs: Sequence[PairItem], budget: int) -> list[Scored]:
        """Return the scores of both answers of each pair, on every rank."""
        return score_pairs(engine, pairs, budget=budget, packing=self.packing, pad_id=self.pad_id)

    def evaluate(self, engine: Engine, held_out: Sequence[PairItem], budget: int) -> dict[str, float]:
        """Return the share of held-out pairs that are ranked right; nothing if none are held out."""
        if not held_out:
            return {}
        found = accuracies(self.scores(engine, held_out, budget))
        return {"eval_accuracy": float(found["eval_accuracy"])}  # type: ignore[arg-type]


def micro_batches(
    pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int
) -> tuple[list[PairBatch], list[list[int]]]:
    """Return this rank's micro-batches of a global batch, and the indices of the pairs of each."""
    collate, lengths = _collate(packing, pad_id), pair_lengths(pairs, packing=packing)
    return local_microbatches(pairs, lengths, collate, budget=pair_budget(budget, packing=packing), packing=packing)


def score_pairs(engine: Engine, pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> list[Scored]:
    """Return the scores of both answers of each pair, on every rank. The ranks share the work."""
    if not pairs:
        return []
    batches, indices = micro_batches(pairs, budget=budget, packing=packing, pad_id=pad_id)
    scores = score_items(engine, batches, indices, _both_scores)
    return [Scored(pair, *both) for pair, both in zip(pairs, scores, strict=True)]


def _both_scores(module: nn.Module, batch: PairBatch) -> Sequence[Tensor]:
    """Return the scores (2,) of the chosen and the rejected answer of each pair."""
    values, count = module(batch.input_ids, documents=batch.documents), len(batch.margins)
    return last_scores(values, batch.ends)[: 2 * count].view(2, count).unbind(1)


def _collate(packing: bool, pad_id: int) -> Callable[[Sequence[PairItem]], PairBatch]:
    make = pack_pairs if packing else collate_pairs
    return lambda pairs: make(pairs, pad_id)
