"""Pairs, what the reference gives their answers, and a step's pairs as this rank's micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.parallel import dist
from pipeline.data.batch import Movable, collate_pairs, pack_pairs
from pipeline.data.documents import Documents
from pipeline.data.encode import PairItem
from pipeline.data.pairs import largest_pairs, longer, pair_batches, together


@dataclass(frozen=True, eq=False)
class AnswerBatch(Movable):
    """B pairs: chosen answers, then rejected ones.

    input_ids (2B, T) or (1, N) long, and documents: as in `PairBatch`; in one row the answers share their prompt
    scored (M,) long: where the tokens of the answers are in the flattened ids
    slots (M,) long: where each of them is in a table (2B, R), flattened, of answers
    lengths (2B,) fp32: tokens of each answer, its end token among them
    reference (2B,) fp32: the reference's log-probability of each answer
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
    """N pairs, and the reference's log-probabilities (N, 2) fp32 of chosen and rejected answers, on the host."""

    items: Sequence[PairItem]
    reference: Tensor

    def __len__(self) -> int:
        return len(self.items)

    def micro_batches(
        self, places: Sequence[int], *, budget: int, packing: bool, pad_id: int
    ) -> tuple[list[AnswerBatch], list[list[int]]]:
        """This rank's micro-batches of the pairs at `places`, and which of these each holds.

        budget: tokens a micro-batch, both sides and padding included; packing: each is one row without padding.
        """
        sizes, collate = self._sizes(places, packing), self._collate(packing=packing, pad_id=pad_id)
        return pair_batches(places, sizes, collate, budget=budget, packing=packing)

    def largest_batch(self, *, budget: int, packing: bool, pad_id: int) -> AnswerBatch:
        """The largest micro-batch that a step can have."""
        places = range(len(self))
        sizes, collate = self._sizes(places, packing), self._collate(packing=packing, pad_id=pad_id)
        return largest_pairs(places, sizes, collate, budget=budget, packing=packing)

    def _sizes(self, places: Sequence[int], packing: bool) -> list[int]:
        items = (self.items[place] for place in places)
        return [together(item, before_last_of_prompt) if packing else longer(item) for item in items]

    def _collate(self, *, packing: bool, pad_id: int) -> Callable[[Sequence[int]], AnswerBatch]:
        device = dist.world().device

        def collate(places: Sequence[int]) -> AnswerBatch:
            chosen = [self.items[place] for place in places]
            return lay_out(chosen, self.reference[list(places)], pad_id, packing=packing).to(device)

        return collate


def before_last_of_prompt(item: PairItem) -> int:
    """Tokens that both sides share in a row: the prompt's last one stands before each answer, which it predicts."""
    return item.prompt - 1


def lay_out(items: Sequence[PairItem], reference: Tensor, pad_id: int, *, packing: bool) -> AnswerBatch:
    """Pairs side by side, `reference` (B, 2) with them. No pairs: two tokens of padding, of which none is scored."""
    if packing:
        pairs = pack_pairs(items, pad_id, shared=before_last_of_prompt)
    else:
        pairs = collate_pairs(items, pad_id)
    lengths = [len(item.chosen) - item.prompt for item in items] + [len(item.rejected) - item.prompt for item in items]
    longest = max(lengths, default=0)
    ends = pairs.ends[: len(lengths)].tolist()
    scored = [torch.arange(end + 1 - length, end + 1) for end, length in zip(ends, lengths, strict=True)]
    slots = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
    nothing = torch.empty(0, dtype=torch.long)
    return AnswerBatch(
        pairs.input_ids,
        torch.cat([nothing, *scored]),
        torch.cat([nothing, *slots]),
        torch.tensor(lengths, dtype=torch.float32),
        reference.T.flatten(),
        longest,
        pairs.documents,
    )


def answer_logprobs(module: nn.Module, batch: AnswerBatch) -> Tensor:
    """(2B,) fp32: the policy's log-probability of each answer."""
    logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
    table = logprobs.new_zeros(len(batch.lengths) * batch.longest).index_put((batch.slots,), logprobs)
    return table.view(len(batch.lengths), batch.longest).sum(1)
