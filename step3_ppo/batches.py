"""The micro-batches of PPO, and what the actor and the critic compute for them.

Letters: b sequences of a micro-batch, T tokens of the longest, N response tokens of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.data import microbatches
from pipeline.data.batch import Documents, Movable, lay_out


@dataclass(frozen=True, eq=False)
class Microbatch(Movable):
    """Some sequences, each a prompt with its response.

    indices: which sequences of the rollout
    input_ids: (b, T) long, padded on the right; with `documents` (1, T), all sequences in one row without padding
    scored: (N,) long, positions of the response tokens in the flattened ids, without those of messages
    ends: (b,) long, position of the last token of each sequence
    response_lengths: number of scored tokens of each sequence
    """

    indices: list[int]
    input_ids: Tensor
    scored: Tensor
    ends: Tensor
    response_lengths: list[int]
    documents: Documents | None = None


def collate(
    prompts: list[list[int]],
    responses: list[list[int]],
    indices: Sequence[int],
    pad_id: int,
    *,
    packing: bool = False,
    sampled: Sequence[Sequence[bool]] | None = None,
) -> Microbatch:
    """Return the sequences at `indices` on the host.

    sampled: which tokens of each response the policy sampled; None: all

    Without sequences the micro-batch is one padding token, so that a rank without work takes part in collectives.
    """
    sequences = [prompts[i] + responses[i] for i in indices]
    input_ids, ends, documents = lay_out(sequences, pad_id, packing=packing)
    spans = [torch.arange(end + 1 - len(responses[i]), end + 1) for end, i in zip(ends, indices, strict=False)]
    if sampled is not None:
        spans = [span[torch.tensor(sampled[i])] for span, i in zip(spans, indices, strict=True)]
    scored = torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)
    return Microbatch(list(indices), input_ids, scored, torch.tensor(ends), list(map(len, spans)), documents)


def local_microbatches(
    prompts: list[list[int]],
    responses: list[list[int]],
    indices: Sequence[int],
    pad_id: int,
    budget: int,
    *,
    packing: bool = False,
    sampled: Sequence[Sequence[bool]] | None = None,
) -> list[Microbatch]:
    """Return this rank's micro-batches of the sequences at `indices`, on its device. All ranks get equally many."""
    make = partial(collate, prompts, responses, pad_id=pad_id, packing=packing, sampled=sampled)
    lengths = [len(prompts[i]) + len(responses[i]) for i in indices]
    return microbatches.local_microbatches(indices, lengths, make, budget=budget, packing=packing)[0]


def largest_microbatch(
    prompts: list[list[int]], new_tokens: int, count: int, pad_id: int, budget: int, *, packing: bool = False
) -> Microbatch:
    """Return the largest micro-batch of a step: the `count` longest prompts with responses of `new_tokens` tokens."""
    responses = [[pad_id] * new_tokens] * len(prompts)
    longest = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))[:count]
    make = partial(collate, prompts, responses, pad_id=pad_id, packing=packing)
    lengths = [len(prompts[index]) + new_tokens for index in longest]
    return microbatches.largest_microbatch(longest, lengths, make, budget=budget, packing=packing)


def policy_logprobs(module: nn.Module, batch: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (N,) of the response tokens."""
    logprobs, entropies = module(batch.input_ids, batch.scored, temperature=temperature, documents=batch.documents)
    return logprobs, entropies


def critic_values(module: nn.Module, batch: Microbatch) -> Tensor:
    """Return the critic's value (N,) before each response token."""
    return module(batch.input_ids, documents=batch.documents).flatten().index_select(0, batch.scored - 1)
