"""Gathers and exchanges through shared memory, in more chunks than one, equal those of the backend; ranks that meet."""

import os
import subprocess
import sys
import time
from threading import Thread

import pytest
import torch
from torch import Tensor

from engine.parallel import dist, mailbox, meeting
from engine.parallel.mailbox import Mailbox
from engine.parallel.meeting import LINE, Meeting
from engine.parallel.rank_errors import LostMate
from tests.ranks import run_ranks

NUMBERS = 5000  # 10,000 bytes of bf16: three chunks of a gather, five of an exchange, the last ones short


def numbers_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).bfloat16()


def through_boxes() -> list[tuple[Tensor, Tensor]]:
    """What gathers and exchanges gave: by counts in memory, and by Gloo, as where processors don't write in order."""
    mailbox.HALF = 4096
    box = mailbox.of_world()
    assert box is not None and box is mailbox.of_world()
    mailbox.writes_in_order = lambda: not meeting.writes_in_order()
    other = mailbox._make()
    assert other is not None and (other._meeting is None) != (box._meeting is None)
    return [through_the_box(box), through_the_box(other)]


def through_the_box(box: Mailbox) -> tuple[Tensor, Tensor]:
    """What a gather and an exchange gave; several in a row, so that halves are used again."""
    world, group = dist.world(), dist.mesh(replicate=1, shard=2).get_group("shard")
    gathered = torch.zeros(2 * NUMBERS, dtype=torch.bfloat16)
    received = torch.zeros(2, NUMBERS, dtype=torch.bfloat16)
    for _ in range(3):
        mine = gathered.view(2, -1)[world.rank].copy_(numbers_of(world.rank, NUMBERS))
        box.gather(gathered, mine, group)
        for start, end, pieces in box.exchange(numbers_of(world.rank, 2 * NUMBERS).view(2, -1), group):
            for row, piece in zip(received, pieces, strict=True):
                row[start:end] = piece
    return gathered, received


def test_chunks_come_whole_and_in_order() -> None:
    whole = torch.cat([numbers_of(rank, NUMBERS) for rank in (0, 1)])
    for rank, found in enumerate(run_ranks(through_boxes, 2)):
        sent = [numbers_of(sender, 2 * NUMBERS).view(2, -1)[rank] for sender in (0, 1)]
        for gathered, received in found:
            assert torch.equal(gathered, whole)
            assert torch.equal(received, torch.stack(sent))


def test_who_comes_first_waits_for_the_other() -> None:
    memory = torch.zeros(2 * LINE, dtype=torch.uint8)
    first, second = (Meeting(memory, rank, [os.getpid()]) for rank in range(2))
    past: list[int] = []

    def come() -> None:
        for turn in range(2):
            first.meet()
            past.append(turn)

    thread = Thread(target=come)
    thread.start()
    for turn in range(2):
        while int(memory.view(torch.int64)[0]) <= turn:
            time.sleep(0.001)
        time.sleep(2 * meeting.KEEN)  # into its naps
        assert past == list(range(turn))
        second.meet()
    thread.join(10)
    assert past == [0, 1]


def test_nobody_waits_for_a_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOOK", 0.01)
    with subprocess.Popen([sys.executable, "--version"], stdout=subprocess.DEVNULL) as mate, pytest.raises(LostMate):
        Meeting(torch.zeros(2 * LINE, dtype=torch.uint8), 0, [os.getpid(), mate.pid]).meet()


def test_a_lone_rank_has_none() -> None:
    assert mailbox.of_world() is None


@pytest.mark.parametrize("numbers", [0, 1, 2048, 2049])
def test_every_number_is_in_one_chunk(numbers: int) -> None:
    box = mailbox.Mailbox(torch.zeros(2 * 2 * mailbox.HALF, dtype=torch.uint8), 0, 2)
    covered = [place for _, start, end in box._chunks(numbers, 2048) for place in range(start, end)]
    assert covered == list(range(numbers))
