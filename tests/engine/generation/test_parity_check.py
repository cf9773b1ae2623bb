"""The parity check passes for a correct generator and names the cause of each error that is put in."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from engine.generation import attention, model_support, parity_check
from engine.generation.decode_loop import DecodeLoop
from engine.generation.generator import Generator
from engine.parallel import comm_hooks
from tests.engine.generation.families import FAMILIES, build


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str, dtype: torch.dtype) -> None:
    checked = parity_check.check_generator(Generator(in_dtype(build(family), dtype), "cpu"))
    assert [len(answer.prompt) for answer in checked] == [5, 12, 10]
    assert all(len(answer.answer.token_ids) == model_support.NEW_TOKENS for answer in checked)


def test_a_short_context_shortens_the_prompts() -> None:
    model = build("gpt2", n_positions=14)
    assert [len(answer.prompt) for answer in parity_check.check_generator(Generator(model, "cpu"))] == [5, 6, 6]


def test_a_layer_with_wrong_attention_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's attention ignores its sliding window."""
    model = build("gemma2", sliding_window=6, layer_types=["sliding_attention", "sliding_attention"])
    slot_attention = attention.slot_attention

    def without_window(module: nn.Module, *states: Any, sliding_window: int | None = None, **rest: Any) -> Any:
        return slot_attention(module, *states, sliding_window=sliding_window if module.layer_idx == 0 else None, **rest)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, without_window)
    with pytest.raises(ValueError, match=r"does not compute Gemma2ForCausalLM: .*forward with a cache"):
        parity_check.check_generator(Generator(model, "cpu"))


def test_permuted_keys_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_attention = attention.slot_attention

    def reversed_(module: nn.Module, query: torch.Tensor, *states: Any, **rest: Any) -> Any:
        key, value, *mask = states
        return slot_attention(module, query, key.flip(2), value.flip(2), *mask, **rest)

    rollouts = Generator(build("llama"), "cpu")
    parity_check.check_generator(rollouts)
    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, reversed_)
    with pytest.raises(ValueError, match=r"does not compute LlamaForCausalLM: .*forward with a cache"):
        parity_check.check_generator(rollouts)


def test_packs_of_older_weights_are_detected() -> None:
    """The weights change without a call of `refresh`, so the packed weights are old."""
    torch.manual_seed(0)
    model = in_dtype(build("opt", hidden_size=128, word_embed_proj_dim=128, ffn_dim=256), torch.bfloat16)
    rollouts = Generator(model, "cpu")
    parity_check.check_generator(rollouts)
    assert isinstance(rollouts.backend, DecodeLoop)
    if not rollouts.backend.model.packs._products:
        pytest.skip("this PyTorch packs no weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = 1.5 * parameter  # at a new address, because packs may read weights in place
    with pytest.raises(ValueError, match="weights of an earlier step"):
        parity_check.check_generator(rollouts)
    rollouts.refresh()
    parity_check.check_generator(rollouts)


def test_other_logprobs_are_refused() -> None:
    checked = parity_check.check_generator(Generator(build("llama"), "cpu"))
    logprobs = [torch.tensor(answer.answer.logprobs) for answer in checked]
    parity_check.compare_logprobs(checked, logprobs)
    logprobs[1] = logprobs[1] - 0.1
    with pytest.raises(ValueError, match=r"the trainer's forward gives.*differ by 0\.1"):
        parity_check.compare_logprobs(checked, logprobs)


@torch.no_grad()
def test_large_logits_do_not_hide_a_difference() -> None:
    """Logits of 20 round by 0.06 in bf16; the log-probabilities of likely tokens must be more precise than 0.3."""
    model = in_dtype(build("llama"), torch.bfloat16)
    model.lm_head.weight.mul_(8)
    checked = parity_check.check_generator(Generator(model, "cpu"))
    prompt = checked[0].prompt + checked[0].answer.token_ids
    assert model(torch.tensor([prompt])).logits.abs().max() > 18
    logprobs = [torch.tensor(answer.answer.logprobs) for answer in checked]
    parity_check.compare_logprobs(checked, logprobs)
    with pytest.raises(ValueError, match=r"the trainer's forward gives.*differ by 0\.3"):
        parity_check.compare_logprobs(checked, [each - 0.3 for each in logprobs])


def test_rounding_is_the_first_order_change_of_a_logprob() -> None:
    """Compare with a finite difference in float64 in the worst direction, without the constant part of the layers."""
    model, token_ids = in_dtype(build("llama"), torch.bfloat16), [3, 0, 1]
    logits = torch.tensor(
        [[20.0, -7.0, 3.0, 19.5], [60.0, 40.0, -60.0, float("-inf")], [-100.0, -100.5, -99.0, -104.0]]
    )
    logits = logits.double()
    actual = parity_check.rounding(model, logits, token_ids) - parity_check.LAYER_TOLERANCE[torch.bfloat16]
    step = 1e-6
    for row, (z, token) in enumerate(zip(logits, token_ids, strict=True)):
        logprob = z.log_softmax(-1)[token]
        change = sum(
            abs(float(torch.where(torch.arange(4) == j, z * (1 + step), z).log_softmax(-1)[token] - logprob))
            for j in range(4)
        )
        assert float(actual[row]) == pytest.approx(2**-7 * change / step, rel=1e-3, abs=1e-9)


@torch.no_grad()
def test_a_trainer_with_8_bit_weights_passes() -> None:
    model = build("llama")
    checked = parity_check.check_generator(Generator(model, "cpu"))
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        numbers = parameter.data.view(-1)
        numbers.copy_(comm_hooks.decode(comm_hooks.encode(numbers), len(numbers)))
    logprobs = [logprobs_of(rounded, answer) for answer in checked]
    with pytest.raises(ValueError, match="the trainer's forward gives"):
        parity_check.compare_logprobs(checked, logprobs)
    parity_check.compare_logprobs(checked, logprobs, eight_bits=True)
    logprobs[1] = logprobs[1] - 2
    with pytest.raises(ValueError, match=r"the trainer's forward gives.*rounding explains 0\.\d"):
        parity_check.compare_logprobs(checked, logprobs, eight_bits=True)


def logprobs_of(model: nn.Module, answer: parity_check.CheckedAnswer) -> torch.Tensor:
    """Return (n,), the log-probabilities of a checked answer by a forward of the model."""
    ids = torch.tensor([answer.prompt + answer.answer.token_ids])
    before = model(input_ids=ids).logits[0, len(answer.prompt) - 1 : -1].log_softmax(-1)
    return before.gather(-1, ids[0, len(answer.prompt) :, None])[:, 0]
