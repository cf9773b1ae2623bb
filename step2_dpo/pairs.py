"""Pairs of a chosen and a rejected answer: their batches, the loss that `dpo.loss` names, and held-out metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeline.config.stage_sections import DpoSection
from pipeline.data.batch import collate_pairs, pack_pairs
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import (
    largest_microbatch,
    local_microbatches,
    padded_length,
    pair_lengths,
    score_items,
)
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.stages.supervised import StepBatch
from step2_dpo.batches import AnswerBatch, Batches, answer_logprobs, answer_tokens
from step2_dpo.loss import LOSSES, imitation_loss

Result = TypeVar("Result")


def pair_loss(dpo: DpoSection, scores: Tensor, logprobs: Tensor, lengths: Tensor) -> Tensor:
    """Return the loss that `dpo.loss` names, summed over B pairs.

    scores, logprobs, lengths: (2B,), the chosen answers first
    """
    _, loss, keys = LOSSES[dpo.loss]
    pairs, sft_coef = len(scores) // 2, 1.0 if dpo.loss == "orpo" else dpo.sft_coef
    total = loss(scores[:pairs], scores[pairs:], **{key: getattr(dpo, key) for key in keys})
    return total + sft_coef * imitation_loss(logprobs[:pairs], lengths[:pairs]) if sft_coef else total


@dataclass(frozen=True)
class PairBatches(Batches[PairItem]):
    """The training and held-out pairs as batches."""

    @property
    def longest(self) -> int:
        return max(map(padded_length, self.train))

    def step(self, step: int, budget: int) -> StepBatch[AnswerBatch]:
        indices = self.schedule[step]
        pairs = [self.train[i] for i in indices]
        batches, _ = self._divide(local_microbatches, pairs, self.reference["train"][indices], budget)
        return StepBatch(batches, len(pairs), sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

    def largest_microbatch(self, budget: int) -> AnswerBatch:
        return self._divide(largest_microbatch, self.train, self.reference["train"], budget)

    def logprobs(self, examples: Sequence[PairItem], budget: int) -> Tensor:
        no_reference = torch.zeros(len(examples), 2)
        batches, indices = self._divide(local_microbatches, examples, no_reference, budget)
        return torch.tensor(score_items(self.engine, batches, indices, _logprobs_by_pair)).view(len(examples), 2)

    def loss(self, module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        logprobs = answer_logprobs(module, batch)
        scores = LOSSES[self.section.loss][0](logprobs, batch.reference, batch.lengths)
        total = pair_loss(self.section, scores, logprobs, batch.lengths)
        metrics = _metrics(logprobs.detach(), self.section.beta * scores.detach())
        if self.section.has_reference:  # a pair has two answers
            metrics["drift"] = 0.5 * (logprobs.detach() - batch.reference).abs().sum()
        return total, metrics

    def evaluation(self, budget: int) -> tuple[dict[str, float], dict[str, Any]]:
        if not self.held_out:
            return {}, {"eval_pairs": 0}
        logprobs = self.logprobs(self.held_out, budget)
        return held_out_metrics(self.section, self.held_out, logprobs, self.reference["held_out"])

    def _divide(
        self, divide: Callable[..., Result], pairs: Sequence[PairItem], reference: Tensor, budget: int
    ) -> Result:
        """Return the micro-batches that `divide` makes of pairs with their `reference` (N, 2)."""

        def collate(indices: Sequence[int]) -> AnswerBatch:
            chosen = [pairs[i] for i in indices]
            return collate_answers(chosen, reference[list(indices)], self.pad_id, packing=self.packing)

        lengths = pair_lengths(pairs, packing=self.packing, shared=before_last_of_prompt)
        return divide(range(len(pairs)), lengths, collate, budget=budget, packing=self.packing)


def before_last_of_prompt(pair: PairItem) -> int:
    """Return how many tokens both sides share in a packed row: the last token of the prompt precedes each answer."""
    return pair.prompt - 1


def collate_answers(pairs: Sequence[PairItem], reference: Tensor, pad_id: int, *, packing: bool) -> AnswerBatch:
    """Return the batch of B pairs with their `reference` (B, 2). An empty batch has two unscored padding tokens.

    In a packed row both answers of a pair share their prompt.
    """
    sides = pack_pairs(pairs, pad_id, shared=before_last_of_prompt) if packing else collate_pairs(pairs, pad_id)
    lengths = answer_lengths(pairs).T.flatten()
    scored, slots, longest = answer_tokens(sides.ends[: len(lengths)].tolist(), lengths.tolist())
    return AnswerBatch(sides.input_ids, scored, slots, lengths.float(), reference.T.flatten(), longest, sides.documents)


def answer_lengths(pairs: Sequence[PairItem]) -> Tensor:
    """Return the number of tokens of the chosen and the rejected answer of each pair, (N, 2) long."""
    sides = [(len(pair.chosen) - pair.prompt, len(pair.rejected) - pair.prompt) for pair in pairs]
    return torch.tensor(sides, dtype=torch.long).view(len(pairs), 2)


def _logprobs_by_pair(module: nn.Module, batch: AnswerBatch) -> Sequence[Tensor]:
    """Return the log-probabilities of the chosen and the rejected answer, (2,), for each pair."""
    return answer_logprobs(module, batch).view(2, len(batch.lengths) // 2).unbind(1)


def _metrics(logprobs: Tensor, rewards: Tensor) -> dict[str, float | Tensor]:
    """Return the metrics of a micro-batch, summed over pairs."""
    pairs = len(rewards) // 2
    chosen, rejected = rewards.view(2, pairs)
    return {
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "chosen_logprob": logprobs[:pairs].sum(),
        "rejected_logprob": logprobs[pairs:].sum(),
    }


def held_out_metrics(
    dpo: DpoSection, pairs: Sequence[PairItem], logprobs: Tensor, reference: Tensor
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return loss, accuracy, margin and rewards of held-out pairs; and these with the accuracies by source and length.

    logprobs, reference: (N, 2) under the policy and under the reference
    """
    lengths = answer_lengths(pairs).float()
    scores = LOSSES[dpo.loss][0](logprobs, reference, lengths)
    margins = scores[:, 0] - scores[:, 1]
    loss = pair_loss(dpo, *(table.T.flatten() for table in (scores, logprobs, lengths)))
    chosen, rejected = (dpo.beta * scores.mean(0)).tolist()
    metrics = {
        "eval_loss": loss.item() / len(pairs),
        "eval_accuracy": (margins > 0).double().mean().item(),
        "eval_margin": dpo.beta * margins.mean().item(),
        "eval_chosen_reward": chosen,
        "eval_rejected_reward": rejected,
    }
    scored = [Scored(pair, *both) for pair, both in zip(pairs, scores.tolist(), strict=True)]
    return metrics, {**metrics, **accuracies(scored)}
