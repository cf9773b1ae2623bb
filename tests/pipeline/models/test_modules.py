"""Policy and Scorer give transformers' numbers for many families, packed and padded."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.parallel import dtensors
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import verify
from tests.pipeline.models.tiny import (
    after_first,
    classifier,
    config_of,
    frozen,
    ids_of,
    language_model,
    policy_logprobs,
    source_in,
    trained,
)

PLAIN = ["opt", "gpt2", "gpt_neox", "llama", "qwen3", "gemma2", "bloom"]
SCALED = ["cohere", "granite"]
SCORED = [*PLAIN, "mixtral", "granite"]


def reference(logits: Tensor, ids: Tensor, temperature: float) -> tuple[list[float], list[float]]:
    """Return float64 log-probabilities and entropies of all tokens except the first of each row."""
    logprobs, entropies = [], []
    for row, line in zip(ids.tolist(), (logits.detach().double().cpu() / temperature).tolist(), strict=True):
        for token, scores in zip(row[1:], line[:-1], strict=True):
            highest = max(scores)
            total = math.fsum(math.exp(s - highest) for s in scores)
            logs = [s - highest - math.log(total) for s in scores]
            logprobs.append(logs[token])
            entropies.append(-math.fsum(math.exp(x) * x for x in logs))
    return logprobs, entropies


@pytest.mark.parametrize("family", PLAIN + SCALED)
def test_policy_gives_the_log_softmax_of_the_models_logits(family: str, tmp_path: Path) -> None:
    model = language_model(config_of(family))
    model.save_pretrained(tmp_path)
    engine = build_policy(source_in(tmp_path), frozen())
    verify(engine, max_length=32)
    assert engine.module.use_logits == (family in SCALED)
    ids = ids_of(2, 11)
    with torch.no_grad():
        logits = model(input_ids=ids.cpu()).logits
    for temperature in (1.0, 0.7):
        expected, spread = reference(logits, ids, temperature)
        logprobs, entropies = engine(ids, after_first(ids), temperature=temperature)
        assert logprobs.dtype == entropies.dtype == torch.float32
        assert logprobs.tolist() == pytest.approx(expected, abs=3e-5)
        assert entropies.tolist() == pytest.approx(spread, abs=3e-5)


def test_only_scored_tokens_are_returned_in_order(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    engine, ids = build_policy(source_in(tmp_path), frozen()), ids_of(3, 6)
    every, _ = engine(ids, after_first(ids))
    some, _ = engine(ids, torch.tensor([4, 13, 17]))
    assert some.tolist() == pytest.approx([every[3].item(), every[10].item(), every[14].item()], abs=1e-6)
    none, entropies = engine(ids, torch.empty(0, dtype=torch.long))
    assert none.shape == entropies.shape == (0,)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "cohere"])
def test_gradients_equal_those_of_the_models_logits(family: str, tmp_path: Path) -> None:
    model = language_model(config_of(family))
    model.save_pretrained(tmp_path)
    engine = build_policy(source_in(tmp_path), trained())
    verify(engine, max_length=32)
    ids = ids_of(2, 9)
    logprobs, entropies = engine(ids, after_first(ids), temperature=0.7)
    engine.backward(logprobs.sum() + 0.3 * entropies.sum())
    logs = torch.log_softmax(model.double()(input_ids=ids.cpu()).logits[:, :-1] / 0.7, -1)
    chosen = logs.gather(-1, ids.cpu()[:, 1:, None]).sum()
    (chosen - 0.3 * (logs.exp() * logs).sum()).backward()
    expected = dict(model.named_parameters())
    for name, parameter in engine.module.named_parameters():
        assert parameter.grad is not None, name
        gradient = dtensors.full_tensor(parameter.grad).cpu()
        torch.testing.assert_close(gradient, expected[name[3:]].grad.float(), atol=2e-4, rtol=2e-3, msg=name)


@pytest.mark.parametrize("family", SCORED)
def test_scorer_gives_the_classifiers_logit_at_the_last_token(family: str, tmp_path: Path) -> None:
    model = classifier(config_of(family))
    model.save_pretrained(tmp_path)
    engine = build_scorer(source_in(tmp_path), frozen(), pad_id=0)
    lengths = [9, 4, 6]
    ids = ids_of(3, 9)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    values = engine(ids)
    assert values.shape == (3, 9) and values.dtype == torch.float32
    with torch.no_grad():
        own = model(input_ids=ids.cpu(), attention_mask=(ids != 0).long().cpu()).logits[:, 0]
    actual = [values[row, length - 1].item() for row, length in enumerate(lengths)]
    assert actual == pytest.approx(own.tolist(), abs=2e-5)
    for row, length in enumerate(lengths):  # a value depends only on tokens up to its own
        prefix = engine(ids[row : row + 1, : length - 1])[0, -1].item()
        assert values[row, length - 2].item() == pytest.approx(prefix, abs=2e-5)


def test_bf16_scores_keep_more_than_three_digits(tmp_path: Path) -> None:
    classifier(config_of("llama")).save_pretrained(tmp_path)
    engine = build_scorer(source_in(tmp_path), frozen("bf16"), pad_id=0)
    values = engine(ids_of(4, 9))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_and_trained_bf16_models_give_the_same_bits(family: str, tmp_path: Path) -> None:
    """PPO's KL to the reference must start at zero, so both engines must give the same bits."""
    language_model(config_of(family)).save_pretrained(tmp_path)
    still, learns = (build_policy(source_in(tmp_path), choice("bf16")) for choice in (frozen, trained))
    ids = ids_of(4, 60)
    assert torch.equal(policy_logprobs(still, ids), policy_logprobs(learns, ids))
