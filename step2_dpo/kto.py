"""KTO: learn from single answers that are labelled desirable or not (Ethayarajh et al., 2024, arXiv:2402.01306).

KTO measures the log-ratio of an answer from a baseline, the KL to the reference. The paper estimates the KL by the
log-ratios of unrelated answers: the answers to other prompts of the batch. Here the unrelated answer of an example is
fixed, so that its log-probability under the reference is computed once. The baseline of a step is a mean over the
global batch: ranks and micro-batches do not change it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.data.batch import epoch_order, lay_out
from pipeline.data.encode import Ids, LabelledItem
from pipeline.data.microbatches import largest_microbatch, local_microbatches, score_items
from pipeline.stages.supervised import StepBatch
from step2_dpo.batches import AnswerBatch, Batches, answer_logprobs, answer_tokens
from step2_dpo.loss import kto_baseline, kto_loss

Side = tuple[Ids, int]  # the ids of prompt and answer, and the number of tokens of the prompt


@dataclass(frozen=True, eq=False)
class Example:
    """An answer with its label, and an unrelated answer to the same prompt. Both sides have `prompt` tokens of it."""

    ids: Ids
    unrelated: Ids
    prompt: int
    label: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelBatch(AnswerBatch):
    """A micro-batch of A labelled answers.

    labels (A,) bool: whether the answer is desirable
    baseline () fp32: the baseline of the step
    desirable_share: share of desirable answers in the global batch
    """

    labels: Tensor
    baseline: Tensor
    desirable_share: float


def examples_of(items: Sequence[LabelledItem], *, max_length: int) -> list[Example]:
    """Return each item with an unrelated answer: that of the next item with another prompt, in a random order.

    The order depends on the number of items only. In the order of the data, both answers of a pair would get the chosen
    answer of the next pair, and chosen answers alone would estimate the baseline. If no item has another prompt, the
    answer is that of the next item; a single item has its own answer.
    """
    prompts = [item.ids[: item.prompt] for item in items]
    order = epoch_order(len(items), seed=0, epoch=0)
    others: dict[int, int] = {}
    for place, index in enumerate(order):
        following = chain(range(place + 1, len(items)), range(place))  # a list for each item would take n^2 time
        unlike = (order[i] for i in following if not np.array_equal(prompts[order[i]], prompts[index]))
        others[index] = next(unlike, order[(place + 1) % len(items)])
    examples = []
    for index, item in enumerate(items):
        other = items[others[index]]
        unrelated = np.concatenate([prompts[index], other.ids[other.prompt :]])[:max_length]
        examples.append(Example(item.ids, unrelated, item.prompt, item.label))
    return examples


def collate_sides(sides: Sequence[Side], reference: Tensor, pad_id: int, *, packing: bool) -> AnswerBatch:
    """Return the batch of B sequences with their `reference` (B,). An empty batch has one unscored padding token."""
    input_ids, ends, documents = lay_out([ids for ids, _ in sides], pad_id, packing=packing)
    lengths = [len(ids) - prompt for ids, prompt in sides]
    scored, slots, longest = answer_tokens(ends[: len(sides)], lengths)
    counts = torch.tensor(lengths, dtype=torch.float32)
    return AnswerBatch(input_ids, scored, slots, counts, reference, longest, documents)


@dataclass(frozen=True)
class LabelBatches(Batches[Example]):
    """The labelled answers as batches. The second answer of each example is the unrelated one."""

    @property
    def longest(self) -> int:
        return max(max(len(each.ids), len(each.unrelated)) for each in self.train)

    def step(self, step: int, budget: int) -> StepBatch[AnswerBatch]:
        """Return the batch of a step, with its baseline under the present policy."""
        indices = self.schedule[step]
        examples, reference = [self.train[i] for i in indices], self.reference["train"][indices]
        logprobs = self._logprobs([(each.unrelated, each.prompt) for each in examples], budget)
        make = self._collate(examples, reference[:, 0], kto_baseline(logprobs - reference[:, 1]))
        lengths = [len(each.ids) for each in examples]
        order = range(len(examples))
        batches, _ = local_microbatches(order, lengths, make, budget=budget, packing=self.packing)
        return StepBatch(batches, len(examples), sum(lengths))

    def largest_microbatch(self, budget: int) -> AnswerBatch:
        lengths = [len(each.ids) for each in self.train]
        make = self._collate(self.train, torch.zeros(len(lengths)), torch.zeros(()))
        return largest_microbatch(range(len(lengths)), lengths, make, budget=budget, packing=self.packing)

    def evaluation(self, budget: int) -> tuple[dict[str, float], dict[str, Any]]:
        if not self.held_out:
            return {}, {"eval_answers": 0}
        own, unrelated = self.logprobs(self.held_out, budget).sub(self.reference["held_out"]).unbind(1)
        labels, baseline = torch.tensor([each.label for each in self.held_out]), kto_baseline(unrelated)
        metrics = {
            "eval_loss": self._loss(own, labels, baseline).item() / len(labels),
            "eval_label_accuracy": ((own > baseline) == labels).double().mean().item(),
        }
        for name, chosen in (("chosen", labels), ("rejected", ~labels)):
            if chosen.any():
                metrics[f"eval_{name}_reward"] = self.section.beta * own[chosen].mean().item()
        return metrics, {**metrics, "eval_answers": len(labels)}

    def loss(self, module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        assert isinstance(batch, LabelBatch)
        log_ratios = answer_logprobs(module, batch) - batch.reference
        total = self._loss(log_ratios, batch.labels, batch.baseline)
        rewards, labels = self.section.beta * log_ratios.detach(), batch.labels
        desirable, undesirable = (rewards * labels).sum(), (rewards * ~labels).sum()
        return total, {
            "label_accuracy": ((log_ratios.detach() > batch.baseline) == labels).sum(),
            "chosen_reward": desirable / max(batch.desirable_share, 1e-9),
            "rejected_reward": undesirable / max(1.0 - batch.desirable_share, 1e-9),
            "baseline": batch.baseline * len(labels),
            "drift": log_ratios.detach().abs().sum(),
        }

    def logprobs(self, examples: Sequence[Example], budget: int) -> Tensor:
        sides = [(each.ids, each.prompt) for each in examples] + [(each.unrelated, each.prompt) for each in examples]
        return self._logprobs(sides, budget).view(2, len(examples)).T

    def _logprobs(self, sides: Sequence[Side], budget: int) -> Tensor:
        """Return the log-probability of each answer, (N,) fp32, on the CPU of every rank. The ranks share the work."""

        def collate(chosen: Sequence[Side]) -> AnswerBatch:
            return collate_sides(chosen, torch.zeros(len(chosen)), self.pad_id, packing=self.packing)

        def work(module: nn.Module, batch: AnswerBatch) -> Sequence[Tensor]:
            return answer_logprobs(module, batch).unbind()

        lengths = [len(ids) for ids, _ in sides]
        batches, indices = local_microbatches(sides, lengths, collate, budget=budget, packing=self.packing)
        return torch.tensor(score_items(self.engine, batches, indices, work))

    def _loss(self, log_ratios: Tensor, labels: Tensor, baseline: Tensor) -> Tensor:
        weight = self.section.undesirable_weight
        return kto_loss(log_ratios, labels, baseline, beta=self.section.beta, undesirable_weight=weight)

    def _collate(
        self, examples: Sequence[Example], reference: Tensor, baseline: Tensor
    ) -> Callable[[Sequence[int]], LabelBatch]:
        """Return the function that makes the batch of the examples at some indices."""
        share = sum(each.label for each in examples) / len(examples)

        def collate(indices: Sequence[int]) -> LabelBatch:
            chosen = [examples[i] for i in indices]
            sides = [(each.ids, each.prompt) for each in chosen]
            answers = collate_sides(sides, reference[list(indices)], self.pad_id, packing=self.packing)
            labels = torch.tensor([each.label for each in chosen], dtype=torch.bool)
            return LabelBatch(**vars(answers), labels=labels, baseline=baseline, desirable_share=share)

        return collate
