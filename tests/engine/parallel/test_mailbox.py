"""Gathers and exchanges through shared memory, in more chunks than one, equal those of the backend."""

import pytest
import torch
from torch import Tensor

from engine.parallel import dist, mailbox
from tests.ranks import run_ranks

NUMBERS = 5000  # 10,000 bytes of bf16: three chunks of a gather, five of an exchange, the last ones short


def numbers_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).bfloat16()


def through_the_box() -> tuple[Tensor, Tensor]:
    """What a gather and an exchange gave; several in a row, so that halves are used again."""
    mailbox.HALF = 4096
    box = mailbox.of_world()
    assert box is not None and box is mailbox.of_world()
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
    for rank, (gathered, received) in enumerate(run_ranks(through_the_box, 2)):
        assert torch.equal(gathered, whole)
        sent = [numbers_of(sender, 2 * NUMBERS).view(2, -1)[rank] for sender in (0, 1)]
        assert torch.equal(received, torch.stack(sent))


def test_a_lone_rank_has_none() -> None:
    assert mailbox.of_world() is None


@pytest.mark.parametrize("numbers", [0, 1, 2048, 2049])
def test_every_number_is_in_one_chunk(numbers: int) -> None:
    box = mailbox.Mailbox(torch.zeros(2 * 2 * mailbox.HALF, dtype=torch.uint8), 0, 2)
    covered = [place for _, start, end in box._chunks(numbers, 2048) for place in range(start, end)]
    assert covered == list(range(numbers))
