"""The books of decode steps: what is known of each sequence, read at a step's beginning and written at its end.

A row is eight numbers, and a table has one a slot. `take_rows` reads those of a step's slots into what the forward and
the draw want, side by side; `note_rows` writes down what was drawn, says it, and tests for the end of the answer.

This is the torch implementation, for every device, and the reference for the faster one beside it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The token drawn last, how many are cached, the random stream, how many were drawn and may be, whether the answer
# ended; the slot its prompt is cached in, and how many of its tokens are there: the others are in the row's own slot.
COLUMNS = TOKEN, CACHED, STREAM, DRAWN, LIMIT, ENDED, PROMPT, SHARED = range(8)
NOTHING = -1  # said by a row whose answer had ended before


class Told(NamedTuple):
    """What a step is told of its rows, (B,) int64 each: the token it takes and its position, the tokens seen then (0
    where the answer ended), where in the row's own slot the new one goes, the prompt's slot and tokens there, the
    random stream, how many were drawn.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    places: Tensor
    prompts: Tensor
    shared: Tensor
    streams: Tensor
    drawn: Tensor


class Said(NamedTuple):
    """Where is said what was drawn: tokens (places, slots) int64 and logprobs fp32; `place` () int64 is the one that is
    written now.
    """

    tokens: Tensor
    logprobs: Tensor
    place: Tensor


def take_rows(rows: Tensor, slots: Tensor, place: Tensor) -> Told:
    """What rows (S, 8) int64 tell of slots (B,) int64; `place` goes to the next."""
    place.add_(1)
    told = rows.index_select(0, slots).t()
    lengths = (told[CACHED] + 1) * (1 - told[ENDED])
    places = told[CACHED] - told[SHARED]
    return Told(
        *torch.stack(
            [told[TOKEN], told[CACHED], lengths, places, told[PROMPT], told[SHARED], told[STREAM], told[DRAWN]]
        )
    )


def note_rows(
    rows: Tensor, slots: Tensor, tokens: Tensor, logprobs: Tensor, ends: Tensor, said: Said, seen: Tensor | None = None
) -> None:
    """Note that slots (B,) drew tokens (B,) int64, with logprobs (B,) fp32: what they took before is cached now.

    An answer ends with one of the tokens `ends` (E,), or at its limit. One that had ended says NOTHING, and only its
    token changes. seen: (S, V) True where a token stands in a sequence. A slot may be there twice if it had ended.
    """
    told = rows.index_select(0, slots)
    live = told[:, ENDED] == 0
    told[:, TOKEN] = tokens
    told[:, CACHED] += live
    told[:, DRAWN] += live
    told[:, ENDED] = (tokens[:, None] == ends).any(1) | (told[:, DRAWN] >= told[:, LIMIT]) | ~live
    rows.index_copy_(0, slots, told)
    at = said.place * said.tokens.shape[1] + slots
    said.tokens.view(-1).index_copy_(0, at, torch.where(live, tokens, NOTHING))
    said.logprobs.view(-1).index_copy_(0, at, logprobs)
    if seen is not None:
        seen.view(-1).index_fill_(0, slots * seen.shape[1] + tokens, True)


def write_tokens(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
    """keys[slots[b], :, positions[b]] = key[b], and likewise values.

    key, value: (B, heads, D); keys, values: (slots, heads, capacity, D), whose head sizes may differ; slots, positions:
    (B,) int64, the places different from one another, or what is written there without meaning.
    """
    keys[slots, :, positions] = key
    values[slots, :, positions] = value
