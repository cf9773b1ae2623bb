"""The rows of the decode table before and after a step, against plain loops."""

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
    SampledTokens,
    read_rows,
    write_rows,
)

SLOTS, VOCABULARY = 30, 11


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 30 sequences, some of them ended, and 21 of their slots in disorder."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(2, 60, (SLOTS, 8), generator=generator)
    rows[:, SEED] = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    rows[:, LIMIT] = rows[:, COUNT] + torch.randint(1, 4, (SLOTS,), generator=generator)
    rows[:, ENDED] = torch.rand(SLOTS, generator=generator) < 0.2
    return rows, torch.randperm(SLOTS, generator=generator)[:21]


def test_rows_are_read() -> None:
    rows, slots = table()
    step = torch.tensor(3)
    inputs = read_rows(rows, slots, step)
    assert step.item() == 4
    for at, slot in enumerate(slots.tolist()):
        row = rows[slot].tolist()
        length, place = 0 if row[ENDED] else row[CACHED] + 1, row[CACHED] - row[SHARED]
        expected = [row[TOKEN], row[CACHED], length, place, row[PROMPT], row[SHARED], row[SEED], row[COUNT]]
        assert [int(each[at]) for each in inputs] == expected


@pytest.mark.parametrize("end_ids", [[], [4, 7]])
def test_sampled_tokens_are_written(end_ids: list[int]) -> None:
    rows, slots = table()
    tokens = torch.randint(VOCABULARY, (len(slots),), generator=torch.Generator().manual_seed(5))
    logprobs = -torch.arange(len(slots)).float()
    sampled = SampledTokens(torch.full((3, SLOTS), 77), torch.zeros(3, SLOTS), torch.tensor(1))
    seen = torch.zeros(SLOTS, VOCABULARY, dtype=torch.bool)
    expected = [t.clone() for t in (rows, sampled.tokens, sampled.logprobs, seen)]
    for slot, token, logprob in zip(slots.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        row, live = expected[0][slot], not rows[slot, ENDED]
        row[TOKEN], row[CACHED], row[COUNT] = token, row[CACHED] + live, row[COUNT] + live
        row[ENDED] = not live or token in end_ids or row[COUNT] >= row[LIMIT]
        expected[1][1, slot], expected[2][1, slot] = token if live else NOTHING, logprob
        expected[3][slot, token] = True
    write_rows(rows, slots, tokens, logprobs, torch.tensor(end_ids, dtype=torch.int64), sampled, seen)
    for ours, right in zip((rows, sampled.tokens, sampled.logprobs, seen), expected, strict=True):
        assert torch.equal(ours, right)
