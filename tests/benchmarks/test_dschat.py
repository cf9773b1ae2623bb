"""A step of the published run on tiny shapes: phases, updated models, packed batches and FLOPs."""

import pytest
import torch

from benchmarks import dschat
from benchmarks.gpu.setting import Setting
from engine.parallel import dist, dtensors


@pytest.fixture(scope="module")
def chat() -> dschat.Chat:
    dist.start("test")
    return dschat.build(dschat.TEST_SIZE)


def test_a_step_has_its_phases_and_moves_both_models(chat: dschat.Chat) -> None:
    def weights() -> list[torch.Tensor]:
        engines = (chat.actor, chat.critic, chat.reference, chat.reward)
        return [dtensors.full_tensor(next(iter(engine.module.parameters()))).detach().clone() for engine in engines]

    before = weights()
    seconds = dschat.step(chat, Setting(dist.world().device, tiny=True), 1)
    assert list(seconds) == ["generate", "score", "train_actor", "train_critic"] and min(seconds.values()) > 0
    assert [torch.equal(a, b) for a, b in zip(before, weights(), strict=True)] == [False, False, True, True]


def test_packed_batches_hold_every_sequence_once_with_its_response_positions(chat: dschat.Chat) -> None:
    length = 2 * chat.size.length
    ids = torch.arange(chat.size.batch * length).view(chat.size.batch, length) % 500
    batches = dschat._pack(chat, ids)
    indices = range(chat.size.batch)
    assert [index for batch in batches for index in indices[batch.indices]] == [*indices]
    for batch in batches:
        assert torch.equal(batch.input_ids.view(-1, length), ids[batch.indices])
        assert batch.documents.lengths == (length,) * len(indices[batch.indices])
        assert batch.ends.tolist() == batch.documents.ends()
        assert torch.equal(batch.input_ids.flatten()[batch.scored], ids[batch.indices, chat.size.length :].flatten())


def test_flops_of_a_forward_by_hand(chat: dschat.Chat) -> None:
    parameters = sum(p.numel() for p in chat.critic.module.parameters())
    assert dschat._forward_flops(chat.critic, 16) == 2 * parameters + 2 * 2 * 32 * 16
