"""Sequences as a forward takes them, and what the models' forwards give for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from engine.parallel import dist
from engine.uploads import uploaded
from pipeline.data.batch import padded
from pipeline.data.documents import Documents
from pipeline.data.microbatch import largest_microbatch, local_microbatches


@dataclass(frozen=True)
class Rows:
    """Some sequences as a forward takes them.

    places: which b sequences; input_ids (b, T), padded on the right, or (1, N) with `documents`, without padding;
    scored (N,), where the response tokens lie in the flattened ids; ends (b,), where each one's last token does;
    counts: response tokens of each.
    """

    places: list[int]
    input_ids: Tensor
    scored: Tensor
    ends: Tensor
    counts: list[int]
    documents: Documents | None = None


def rows(
    prompts: list[list[int]], responses: list[list[int]], places: Sequence[int], pad_id: int, *, packing: bool = False
) -> Rows:
    """Put sequences side by side, in a row each or all in one. No sequences give one padding token, so that a rank
    without work can take part.
    """
    counts = [len(responses[i]) for i in places]
    sequences = [prompts[i] + responses[i] for i in places] or [[pad_id]]
    lengths = [len(sequence) for sequence in sequences]
    if packing:
        documents = Documents(tuple(lengths))
        ids, ends = torch.tensor([[*chain.from_iterable(sequences)]]), documents.ends()
    else:
        documents, ids = None, padded(sequences, pad_id)[0]
        ends = [row * ids.shape[1] + length - 1 for row, length in enumerate(lengths)]
    spans = [torch.arange(end + 1 - count, end + 1) for end, count in zip(ends, counts, strict=False)]
    scored = torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)
    ids, scored, last = (uploaded(tensor, dist.world().device) for tensor in (ids, scored, torch.tensor(ends)))
    return Rows(list(places), ids, scored, last, counts, documents)


def my_rows(
    prompts: list[list[int]],
    responses: list[list[int]],
    places: Sequence[int],
    pad_id: int,
    budget: int,
    *,
    packing: bool = False,
) -> list[Rows]:
    """This rank's micro-batches of some sequences; every rank gets equally many."""
    lay_out = partial(rows, prompts, responses, pad_id=pad_id, packing=packing)
    lengths = [len(prompts[i]) + len(responses[i]) for i in places]
    return local_microbatches(places, lengths, lay_out, budget=budget, packing=packing)[0]


def longest_rows(
    prompts: list[list[int]], answer: int, most: int, pad_id: int, budget: int, *, packing: bool = False
) -> Rows:
    """The largest micro-batch that a step can have: of `most` sequences, the longest prompts with answers of `answer`
    tokens.
    """
    responses = [[pad_id] * answer] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))[:most]
    lay_out = partial(rows, prompts, responses, pad_id=pad_id, packing=packing)
    lengths = [len(prompts[place]) + answer for place in order]
    return largest_microbatch(order, lengths, lay_out, budget=budget, packing=packing)


def policy_logprobs(module: nn.Module, batch: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) of the response tokens of a micro-batch."""
    logprobs, entropies = module(batch.input_ids, batch.scored, temperature=temperature, documents=batch.documents)
    return logprobs, entropies


def critic_values(module: nn.Module, batch: Rows) -> Tensor:
    """Values (N,) before each response token: what the critic expects when it has seen all tokens before."""
    return module(batch.input_ids, documents=batch.documents).flatten().index_select(0, batch.scored - 1)


def end_scores(module: nn.Module, batch: Rows) -> Tensor:
    """(b,) the reward model's score at the last token of each sequence."""
    return module(batch.input_ids, documents=batch.documents).flatten()[batch.ends]
