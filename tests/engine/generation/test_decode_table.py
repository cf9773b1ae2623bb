"""Reading and writing the rows of the decode table, against Python loops."""

import pytest
import torch

from engine.generation.decode_step import (
    CACHED,
    COUNT,
    ENDED,
    LIMIT,
    NOTHING,
    PROMPT,
    SEED,
    SHARED,
    TOKEN,
    DecodeState,
)

SLOTS, VOCABULARY = 30, 11


def table() -> tuple[DecodeState, torch.Tensor]:
    """Return a state with the rows of 30 sequences, some of which have ended, and 21 shuffled slots."""
    generator = torch.Generator().manual_seed(4)
    state = DecodeState(SLOTS - 1, 3, torch.device("cpu"))
    rows = torch.randint(2, 60, (SLOTS, 8), generator=generator)
    rows[:, SEED] = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    rows[:, LIMIT] = rows[:, COUNT] + torch.randint(1, 4, (SLOTS,), generator=generator)
    rows[:, ENDED] = torch.rand(SLOTS, generator=generator) < 0.2
    state.rows = rows
    return state, torch.randperm(SLOTS, generator=generator)[:21]


def test_rows_are_read() -> None:
    state, slots = table()
    state.step.fill_(3)
    rows = state.read(torch.stack([slots, torch.arange(len(slots))]))
    assert state.step.item() == 4
    for at, slot in enumerate(slots.tolist()):
        row = state.rows[slot].tolist()
        length, offset = (0, 0) if row[ENDED] else (row[CACHED] + 1, row[CACHED] - row[SHARED])
        inputs = [row[TOKEN], row[CACHED], row[SEED], row[COUNT]]
        assert [int(each[at]) for each in rows] == [slot, *inputs, offset, length, row[PROMPT], row[SHARED], at]


@pytest.mark.parametrize("end_ids", [[], [4, 7]])
def test_sampled_tokens_are_written(end_ids: list[int]) -> None:
    state, slots = table()
    tokens = torch.randint(VOCABULARY, (len(slots),), generator=torch.Generator().manual_seed(5))
    logprobs = -torch.arange(len(slots)).float()
    state.tokens.fill_(77)
    state.step.fill_(1)
    seen = torch.zeros(SLOTS, VOCABULARY, dtype=torch.bool)
    expected = [t.clone() for t in (state.rows, state.tokens, state.logprobs, seen)]
    for slot, token, logprob in zip(slots.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        row, live = expected[0][slot], not state.rows[slot, ENDED]
        row[TOKEN], row[CACHED], row[COUNT] = token, row[CACHED] + live, row[COUNT] + live
        row[ENDED] = not live or token in end_ids or row[COUNT] >= row[LIMIT]
        expected[1][1, slot], expected[2][1, slot] = token if live else NOTHING, logprob
        expected[3][slot, token] = True
    state.write(slots, tokens, logprobs, torch.tensor(end_ids, dtype=torch.int64), seen)
    for actual, wanted in zip((state.rows, state.tokens, state.logprobs, seen), expected, strict=True):
        assert torch.equal(actual, wanted)
