"""A generation that runs out of memory goes on with fewer sequences at a time, and says the same."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import Rollouts, Sampling
from engine.generation.cache.slots import SlotCache

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11, 12]]
HOW = Sampling(max_new_tokens=6, end_ids=(), pad_id=0, seed=3)


def rollouts() -> Rollouts:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return Rollouts(LlamaForCausalLM(config).eval(), "cpu")


def failing_above(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of more slots do not fit."""
    before = SlotCache._allocate

    def allocate(self: SlotCache, states: torch.Tensor) -> torch.Tensor:
        if self.slots > slots:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return before(self, states)

    monkeypatch.setattr(SlotCache, "_allocate", allocate)


def test_fewer_at_a_time_say_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = rollouts().generate(PROMPTS, HOW, streams=range(5), batch_size=5)
    failing_above(2, monkeypatch)
    ours = rollouts()
    for _ in range(2):
        found = ours.generate(PROMPTS, HOW, streams=range(5), batch_size=5)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert ours.most == 2
    assert capsys.readouterr().out.count("memory: it ran out") == 1


def test_one_sequence_that_does_not_fit_ends_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = rollouts()
    ours.refresh()  # the probe of one slot fits
    failing_above(0, monkeypatch)
    with pytest.raises(ValueError, match=r"one sequence is decoded .*rollout.max_new_tokens"):
        ours.generate(PROMPTS, HOW, streams=range(5), batch_size=5)
