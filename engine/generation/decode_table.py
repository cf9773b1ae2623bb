"""The table of the sequences on the device. A decode step reads it at its beginning and writes it at its end.

A row has eight int64 columns; a table has one row per answer slot. `read_rows` returns the inputs of the forward and of
the sampling. `write_rows` stores the sampled tokens and tests for the end of each answer. No function reads a number on
the host, so a CUDA graph can capture a step.

Shapes: S slots, B rows of a step, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# TOKEN: the token sampled last. CACHED: the number of tokens in the cache. SEED: the sample seed. COUNT and LIMIT: the
# tokens sampled so far, and at most. ENDED: 1 after the end of the answer. PROMPT: the slot of the prompt. SHARED: the
# number of tokens that are in the prompt slot; the others are in the row's own slot.
COLUMNS = TOKEN, CACHED, SEED, COUNT, LIMIT, ENDED, PROMPT, SHARED = range(8)
NOTHING = -1  # the token of a row whose answer ended before this step


class StepInputs(NamedTuple):
    """The inputs of a step, (B,) int64 each.

    tokens and positions: the inputs of the forward. lengths: tokens that attention reads, 0 after the end of the
    answer. places: the index in the row's own slot at which the new token is written. prompt_slots and prompt_lengths:
    the prompt slot of the row, and the number of its tokens in this slot. seeds and counts: the sample seed, and the
    number of tokens sampled so far.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    places: Tensor
    prompt_slots: Tensor
    prompt_lengths: Tensor
    seeds: Tensor
    counts: Tensor


class SampledTokens(NamedTuple):
    """The tokens of the last steps.

    tokens: (steps, S) int64. logprobs: (steps, S) fp32. step: () int64, the index of the newest step.
    """

    tokens: Tensor
    logprobs: Tensor
    step: Tensor


def read_rows(rows: Tensor, slots: Tensor, step: Tensor) -> StepInputs:
    """Return the inputs of a step for slots (B,) from rows (S, 8), and advance `step` ()."""
    step.add_(1)
    row = rows.index_select(0, slots).t().contiguous()
    lengths = (row[CACHED] + 1) * (1 - row[ENDED])
    places = row[CACHED] - row[SHARED]
    return StepInputs(row[TOKEN], row[CACHED], lengths, places, row[PROMPT], row[SHARED], row[SEED], row[COUNT])


def write_rows(
    rows: Tensor,
    slots: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    end_ids: Tensor,
    sampled: SampledTokens,
    seen: Tensor | None = None,
) -> None:
    """Store the sampled tokens (B,) int64 and log-probabilities (B,) fp32 of slots (B,), in place.

    The cache contains the token of the previous step. An answer ends with one of `end_ids` (E,) or at its limit. A row
    that had ended stores NOTHING, and only its TOKEN column changes. seen: (S, V) bool, True for the tokens of a
    sequence. A slot may occur twice in `slots` if its answer has ended.
    """
    row = rows.index_select(0, slots)
    live = row[:, ENDED] == 0
    row[:, TOKEN] = tokens
    row[:, CACHED] += live
    row[:, COUNT] += live
    row[:, ENDED] = (tokens[:, None] == end_ids).any(1) | (row[:, COUNT] >= row[:, LIMIT]) | ~live
    rows.index_copy_(0, slots, row)
    indices = sampled.step * sampled.tokens.shape[1] + slots
    sampled.tokens.view(-1).index_copy_(0, indices, torch.where(live, tokens, NOTHING))
    sampled.logprobs.view(-1).index_copy_(0, indices, logprobs)
    if seen is not None:
        seen.view(-1).index_fill_(0, slots * seen.shape[1] + tokens, True)
