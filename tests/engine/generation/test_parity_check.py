"""The parity check: it passes if the generator computes the model, and names the cause if not."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from engine.generation import attention, parity_check
from engine.generation.generator import Generator
from engine.parallel import comm_hooks
from tests.engine.generation.families import FAMILIES, build

DTYPES = (torch.float32, torch.bfloat16)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str) -> None:
    model = build(family)
    for dtype in DTYPES:
        checked = parity_check.check_generator(Generator(in_dtype(model, dtype), "cpu"))
        assert [len(one.prompt) for one in checked] == [5, 12, 10]
        assert all(len(one.answer.token_ids) == parity_check.NEW_TOKENS for one in checked)


def test_a_short_context_shortens_the_prompts() -> None:
    model = build("gpt2", n_positions=14)
    assert [len(one.prompt) for one in parity_check.check_generator(Generator(model, "cpu"))] == [5, 6, 6]


def test_a_layer_that_attends_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that the fast path forgets, in the second layer only."""
    model = build("gemma2", sliding_window=6, layer_types=["sliding_attention", "sliding_attention"])
    right = attention.slot_attention

    def forgetful(module: nn.Module, *states: Any, sliding_window: int | None = None, **rest: Any) -> Any:
        return right(module, *states, sliding_window=sliding_window if module.layer_idx == 0 else None, **rest)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, forgetful)
    with pytest.raises(ValueError, match=r"does not compute Gemma2ForCausalLM: .*forward with a cache"):
        parity_check.check_generator(Generator(model, "cpu"))


def test_keys_in_the_wrong_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.slot_attention

    def reversed_(module: nn.Module, query: torch.Tensor, *states: Any, **rest: Any) -> Any:
        key, value, *mask = states
        return right(module, query, key.flip(2), value.flip(2), *mask, **rest)

    rollouts = Generator(build("llama"), "cpu")
    parity_check.check_generator(rollouts)
    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, reversed_)
    with pytest.raises(ValueError, match=r"does not compute LlamaForCausalLM: .*forward with a cache"):
        parity_check.check_generator(rollouts)


def test_packs_of_older_weights_are_noticed() -> None:
    """What a flip without `refresh` would do."""
    torch.manual_seed(0)
    model = in_dtype(build("opt", hidden_size=128, word_embed_proj_dim=128, ffn_dim=256), torch.bfloat16)
    rollouts = Generator(model, "cpu")
    parity_check.check_generator(rollouts)
    assert rollouts.fallback is None and rollouts._loop is not None
    if not len(rollouts._loop.model.packs):
        pytest.skip("this PyTorch packs no weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = 1.5 * parameter  # elsewhere: packs may read weights where they lie
    with pytest.raises(ValueError, match="weights of an earlier step"):
        parity_check.check_generator(rollouts)
    rollouts.refresh()
    parity_check.check_generator(rollouts)


def test_other_logprobs_are_refused() -> None:
    checked = parity_check.check_generator(Generator(build("llama"), "cpu"))
    right = [torch.tensor(one.answer.logprobs) for one in checked]
    parity_check.compare_logprobs(checked, right, "the trainer")
    right[1] = right[1] - 0.1
    with pytest.raises(ValueError, match=r"the trainer gives.*differ by 0\.1"):
        parity_check.compare_logprobs(checked, right, "the trainer")


@torch.no_grad()
def test_large_logits_hide_no_difference() -> None:
    """Logits of 20 round by 0.06 in bf16; the log-probabilities of likely tokens must be more precise than 0.3."""
    model = in_dtype(build("llama"), torch.bfloat16)
    model.lm_head.weight.mul_(8)
    checked = parity_check.check_generator(Generator(model, "cpu"))
    prompt = checked[0].prompt + checked[0].answer.token_ids
    assert model(torch.tensor([prompt])).logits.abs().max() > 18
    right = [torch.tensor(one.answer.logprobs) for one in checked]
    parity_check.compare_logprobs(checked, right, "the trainer")
    with pytest.raises(ValueError, match=r"the trainer gives.*differ by 0\.3"):
        parity_check.compare_logprobs(checked, [each - 0.3 for each in right], "the trainer")


def test_rounding_is_the_first_order_change_of_a_logprob() -> None:
    """In float64, by a finite difference in the worst direction; the layers' part does not depend on the logits."""
    model, token_ids = in_dtype(build("llama"), torch.bfloat16), [3, 0, 1]
    logits = torch.tensor(
        [[20.0, -7.0, 3.0, 19.5], [60.0, 40.0, -60.0, float("-inf")], [-100.0, -100.5, -99.0, -104.0]]
    )
    logits = logits.double()
    found = parity_check.rounding(model, logits, token_ids) - parity_check.LAYER_TOLERANCE[torch.bfloat16]
    step = 1e-6
    for row, (z, token) in enumerate(zip(logits, token_ids, strict=True)):
        logprob = z.log_softmax(-1)[token]
        change = sum(
            abs(float(torch.where(torch.arange(4) == j, z * (1 + step), z).log_softmax(-1)[token] - logprob))
            for j in range(4)
        )
        assert float(found[row]) == pytest.approx(2**-7 * change / step, rel=1e-3, abs=1e-9)


@torch.no_grad()
def test_a_trainer_with_weights_of_8_bits_is_not_refused_for_them() -> None:
    model = build("llama")
    checked = parity_check.check_generator(Generator(model, "cpu"))
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        numbers = parameter.data.view(-1)
        numbers.copy_(comm_hooks.decode(comm_hooks.encode(numbers), len(numbers)))
    said = [logprobs_of(rounded, one) for one in checked]
    with pytest.raises(ValueError, match="the trainer gives"):
        parity_check.compare_logprobs(checked, said, "the trainer")
    parity_check.compare_logprobs(checked, said, "the trainer", eight_bits=True)
    said[1] = said[1] - 2
    with pytest.raises(ValueError, match=r"the trainer gives.*rounding explains 0\.\d"):
        parity_check.compare_logprobs(checked, said, "the trainer", eight_bits=True)


def logprobs_of(model: nn.Module, one: parity_check.CheckedAnswer) -> torch.Tensor:
    """(n,): a checked answer's log-probabilities by a model's plain forward."""
    ids = torch.tensor([one.prompt + one.answer.token_ids])
    before = model(input_ids=ids).logits[0, len(one.prompt) - 1 : -1].log_softmax(-1)
    return before.gather(-1, ids[0, len(one.prompt) :, None])[:, 0]
