"""The pairs of DPO as micro-batches, with the reference's log-probabilities of their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.data.batch import Documents, Movable, collate_pairs, pack_pairs
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import largest_microbatch, local_microbatches, pair_budget, pair_lengths


@dataclass(frozen=True, eq=False)
class AnswerBatch(Movable):
    """A micro-batch of B pairs. The chosen answers precede the rejected answers in every field.

    input_ids (2B, T) or (1, N) long, and documents: as in `PairBatch`; in a packed row both answers share their prompt
    scored (M,) long: indices of the answer tokens in the flattened ids
    slots (M,) long: index of each answer token in a flattened table (2B, R) of answers
    lengths (2B,) fp32: the number of tokens of each answer, including its end token
    reference (2B,) fp32: the log-probability of each answer under the reference model
    longest: R, the number of tokens of the longest answer
    """

    input_ids: Tensor
    scored: Tensor
    slots: Tensor
    lengths: Tensor
    reference: Tensor
    longest: int
    documents: Documents | None = None


@dataclass(frozen=True)
class Pairs:
    """N pairs with their log-probabilities under the reference model.

    reference (N, 2) fp32 on the CPU: chosen answers, rejected answers; zeros for a loss without a reference
    """

    items: Sequence[PairItem]
    reference: Tensor

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of the chosen and the rejected answer of each pair, (N, 2) fp32."""
        sides = ((len(item.chosen) - item.prompt, len(item.rejected) - item.prompt) for item in self.items)
        return torch.tensor(list(sides), dtype=torch.float32).view(len(self), 2)

    def micro_batches(
        self, indices: Sequence[int], *, budget: int, packing: bool, pad_id: int
    ) -> tuple[list[AnswerBatch], list[list[int]]]:
        """Return this rank's micro-batches of the pairs at `indices`, and the positions in `indices` of each.

        packing: a micro-batch is one row without padding
        """
        collate, lengths = self._collate(packing, pad_id), self._lengths(indices, packing)
        budget = pair_budget(budget, packing=packing)
        return local_microbatches(indices, lengths, collate, budget=budget, packing=packing)

    def largest_batch(self, *, budget: int, packing: bool, pad_id: int) -> AnswerBatch:
        """Return the largest micro-batch that a step can have."""
        indices = range(len(self))
        collate, lengths = self._collate(packing, pad_id), self._lengths(indices, packing)
        budget = pair_budget(budget, packing=packing)
        return largest_microbatch(indices, lengths, collate, budget=budget, packing=packing)

    def _lengths(self, indices: Sequence[int], packing: bool) -> list[int]:
        return pair_lengths([self.items[i] for i in indices], packing=packing, shared=before_last_of_prompt)

    def _collate(self, packing: bool, pad_id: int) -> Callable[[Sequence[int]], AnswerBatch]:
        def collate(indices: Sequence[int]) -> AnswerBatch:
            items = [self.items[i] for i in indices]
            return collate_answers(items, self.reference[list(indices)], pad_id, packing=packing)

        return collate


def before_last_of_prompt(item: PairItem) -> int:
    """Return how many tokens both sides share in a packed row: the last token of the prompt precedes each answer."""
    return item.prompt - 1


def collate_answers(items: Sequence[PairItem], reference: Tensor, pad_id: int, *, packing: bool) -> AnswerBatch:
    """Return the batch of B pairs with their `reference` (B, 2). An empty batch has two unscored padding tokens."""
    if packing:
        pairs = pack_pairs(items, pad_id, shared=before_last_of_prompt)
    else:
        pairs = collate_pairs(items, pad_id)
    lengths = [len(item.chosen) - item.prompt for item in items] + [len(item.rejected) - item.prompt for item in items]
    scored, slots, longest = answer_tokens(pairs.ends[: len(lengths)].tolist(), lengths)
    return AnswerBatch(
        pairs.input_ids,
        scored,
        slots,
        torch.tensor(lengths, dtype=torch.float32),
        reference.T.flatten(),
        longest,
        pairs.documents,
    )


def answer_tokens(ends: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Return `scored`, `slots` and `longest` of an `AnswerBatch` from the last index and the length of each answer."""
    longest = max(lengths, default=0)
    scored = [torch.arange(end + 1 - length, end + 1) for end, length in zip(ends, lengths, strict=True)]
    slots = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
    nothing = torch.empty(0, dtype=torch.long)
    return torch.cat([nothing, *scored]), torch.cat([nothing, *slots]), longest


def answer_logprobs(module: nn.Module, batch: AnswerBatch) -> Tensor:
    """Return the log-probability of each answer under the policy, (2B,) fp32."""
    logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
    table = logprobs.new_zeros(len(batch.lengths) * batch.longest).index_put((batch.slots,), logprobs)
    return table.view(len(batch.lengths), batch.longest).sum(1)
