"""The Triton source of take_rows and note_rows, and their torch paths, against plain loops."""

from typing import Any

import pytest
import torch

from engine.kernels import decode_rows as plain
from engine.kernels import note_rows, take_rows
from engine.kernels_triton import decode_rows as kernel
from tests.engine.kernels.oracle import DEVICE

WAYS = [(kernel.take_rows, kernel.note_rows), (plain.take_rows, plain.note_rows), (take_rows, note_rows)]
SLOTS, VOCABULARY = 300, 11
TOKEN, CACHED, STREAM, DRAWN, LIMIT, ENDED, PROMPT, SHARED = range(8)


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 300 sequences, some of them ended, and 201 of their slots in disorder: no multiple of a program's."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(2, 60, (SLOTS, 8), generator=generator)
    rows[:, STREAM] = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    rows[:, LIMIT] = rows[:, DRAWN] + torch.randint(1, 4, (SLOTS,), generator=generator)
    rows[:, ENDED] = torch.rand(SLOTS, generator=generator) < 0.2
    return rows, torch.randperm(SLOTS, generator=generator)[:201]


@pytest.mark.parametrize(("take", "note"), WAYS)
def test_rows_are_taken(take: Any, note: Any) -> None:
    rows, slots = table()
    place = torch.tensor(3, device=DEVICE)
    told = take(rows.to(DEVICE), slots.to(DEVICE), place)
    assert place.item() == 4 and all(each.is_contiguous() for each in told)
    for at, slot in enumerate(slots.tolist()):
        row = rows[slot].tolist()
        assert [int(each[at]) for each in told] == [
            row[TOKEN], row[CACHED], 0 if row[ENDED] else row[CACHED] + 1, row[CACHED] - row[SHARED], row[PROMPT],
            row[SHARED], row[STREAM], row[DRAWN],
        ]  # fmt: skip


@pytest.mark.parametrize("ends", [[], [2], [4, 7]])
@pytest.mark.parametrize(("take", "note"), WAYS)
def test_what_was_drawn_is_noted(take: Any, note: Any, ends: list[int]) -> None:
    rows, slots = table()
    tokens = torch.randint(VOCABULARY, (len(slots),), generator=torch.Generator().manual_seed(5))
    logprobs = -torch.arange(len(slots)).float()
    said = plain.Said(torch.full((3, SLOTS), 77), torch.zeros(3, SLOTS), torch.tensor(1))
    seen = None if not ends else torch.zeros(SLOTS, VOCABULARY, dtype=torch.bool)
    wanted = [t.clone() for t in (rows, *said[:2], torch.zeros(SLOTS, VOCABULARY, dtype=torch.bool))]
    for slot, token, logprob in zip(slots.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        row, live = wanted[0][slot], not rows[slot, ENDED]
        row[TOKEN], row[CACHED], row[DRAWN] = token, row[CACHED] + live, row[DRAWN] + live
        row[ENDED] = not live or token in ends or row[DRAWN] >= row[LIMIT]
        wanted[1][1, slot], wanted[2][1, slot] = token if live else plain.NOTHING, logprob
        wanted[3][slot, token] = True
    ours = [t if t is None else t.to(DEVICE) for t in (rows, *said, seen)]
    told = (t.to(DEVICE) for t in (slots, tokens, logprobs, torch.tensor(ends, dtype=torch.int64)))
    note(ours[0], *told, plain.Said(*ours[1:4]), ours[4])
    for found, right in zip([*ours[:3], ours[4]], wanted, strict=True):
        assert found is None or torch.equal(found.cpu(), right)
