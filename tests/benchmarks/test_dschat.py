"""The published run's step on tiny shapes: every phase is there, and old log-probabilities are the trainer's own."""

import pytest
import torch

from benchmarks import dschat
from benchmarks.gpu.setting import Setting
from engine.parallel import dist, dtensors


@pytest.fixture(scope="module")
def chat() -> dschat.Chat:
    dist.start("test")
    return dschat.build(dschat.TRIAL)


def test_a_step_has_its_phases_and_moves_both_models(chat: dschat.Chat) -> None:
    def weights() -> list[torch.Tensor]:
        engines = (chat.actor, chat.critic, chat.reference, chat.reward)
        return [dtensors.full_tensor(next(iter(engine.module.parameters()))).detach().clone() for engine in engines]

    before = weights()
    clock = dschat.step(chat, Setting(dist.world().device, tiny=True), 1)
    assert list(clock) == ["generate", "score", "train_actor", "train_critic"] and min(clock.values()) > 0
    assert [torch.equal(a, b) for a, b in zip(before, weights(), strict=True)] == [False, False, True, True]


def test_rows_hold_every_sequence_once_with_its_answer_marked(chat: dschat.Chat) -> None:
    length = 2 * chat.size.length
    ids = torch.arange(chat.size.batch * length).view(chat.size.batch, length) % 500
    rows = dschat._rows(chat, ids)
    whole = range(chat.size.batch)
    assert [place for row in rows for place in whole[row.places]] == [*whole]
    for row in rows:
        assert torch.equal(row.input_ids.view(-1, length), ids[row.places])
        assert row.documents.lengths == (length,) * len(whole[row.places])
        assert row.ends.tolist() == row.documents.ends()
        assert torch.equal(row.input_ids.flatten()[row.scored], ids[row.places, chat.size.length :].flatten())


def test_flops_of_a_forward_by_hand(chat: dschat.Chat) -> None:
    parameters = sum(p.numel() for p in chat.critic.module.parameters())
    assert dschat._forward_flops(chat.critic, 16) == 2 * parameters + 2 * 2 * 32 * 16
