"""`sample` in torch against the filtered distribution in float64 and transformers' processors; edge cases."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import kernels
from engine.generation.sampling import penalise
from engine.kernels.sample import reference
from tests.engine.kernels.oracle import PLAIN, probability_and_border

LAST = 1 - 2**-24  # the largest uniform number


def sample(logits: Tensor, uniforms: Tensor, **filters: Any) -> tuple[Tensor, Tensor]:
    return reference(logits, uniforms, **{**PLAIN, **filters})


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 5, 1.0, 0.0), (0.8, 0, 0.7, 0.0), (1.3, 0, 1.0, 0.2), (0.9, 12, 0.95, 0.1)],
)
def test_tokens_follow_the_filtered_softmax(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """A grid of uniform numbers selects each token in proportion to its probability."""
    torch.manual_seed(1)
    logits = 1.5 * torch.randn(20)
    expected = filtered(logits, temperature, top_k, top_p, min_p)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens, logprobs = sample(logits.expand(10000, -1), torch.arange(10000) / 10000, **filters)
    assert ((torch.bincount(tokens, minlength=20) / 10000 - expected).abs() < 2e-4).all()
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=2e-6, rtol=0)


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Compute the filtered distribution by its definition, token by token in float64."""
    scaled = (logits.double() / temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    order = order[:top_k] if top_k else order
    total = sum(math.exp(scaled[i]) for i in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p or math.exp(scaled[token] - scaled[order[0]]) < min_p:
            break
        kept.append(token)
        mass += math.exp(scaled[token]) / total
    result = torch.zeros(len(scaled), dtype=torch.float64)
    for token in kept:
        result[token] = math.exp(scaled[token]) / total / mass
    return result


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.6, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.3, "min_p": 0.02},
    ],
)
def test_penalty_minimum_and_filters_are_those_of_transformers(filters: dict[str, Any]) -> None:
    """The processors run in the order of transformers' `generate`."""
    torch.manual_seed(2)
    logits, ids, ends = 2 * torch.randn(1, 60), torch.tensor([[3, 9, 9, 41, 17]]), [4, 8, 50]
    logits[0, [3, 4, 50]] = torch.tensor([6.0, 7.0, 5.0])
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), MinNewTokensLengthLogitsProcessor(3, 4, ends)])
    theirs += [TemperatureLogitsWarper(filters["temperature"])]
    theirs += [TopKLogitsWarper(filters["top_k"])] if "top_k" in filters else []
    theirs += [TopPLogitsWarper(filters.get("top_p", 1.0)), MinPLogitsWarper(filters["min_p"])]
    expected = theirs(ids, logits.clone()).softmax(-1)[0]  # type: ignore[arg-type]
    seen = torch.zeros(1, 60, dtype=torch.bool).index_fill_(1, ids[0], True)
    ours = penalise(logits.index_fill(1, torch.tensor(ends), float("-inf")), seen, 1.4).expand(4000, -1)
    tokens, logprobs = sample(ours, torch.arange(4000) / 4000, **filters)
    sampled = torch.bincount(tokens, minlength=60) > 0
    assert not (sampled & (expected == 0)).any() and (sampled | (expected < 4e-4)).all()
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=2e-5, rtol=0)


@pytest.mark.parametrize("size", [4095, 5000, 50257])
@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"top_p": 0.9, "temperature": 1.5}], ids=str)
def test_large_vocabularies_are_inverted_as_in_float64(size: int, filters: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(16, size, generator=generator)
    logits[:, ::7] = float("-inf")
    uniforms = torch.rand(16, generator=generator)
    tokens, logprobs = sample(logits, uniforms, **filters)
    probability, below = probability_and_border(tokens, logits, **{**PLAIN, **filters})
    assert (probability > 0).all()
    assert ((below - 3e-6 <= uniforms) & (uniforms <= below + probability + 3e-6)).all()
    torch.testing.assert_close(logprobs.double(), probability.log(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("size", [6, 5000])
def test_the_first_and_the_last_uniform_number_select_tokens_with_weight(size: int) -> None:
    logits = torch.zeros(3, size)
    logits[:, : size // 3], logits[:, size - 2 :] = float("-inf"), float("-inf")
    for filters in ({}, {"top_p": 1 - 1e-7}, {"top_k": size}, {"min_p": 0.5}):
        tokens, _ = sample(logits, torch.tensor([0.0, 0.5, LAST]), **filters)
        assert tokens[0] == size // 3 and tokens[2] == size - 3 and size // 3 <= tokens[1] < size - 2


def test_greedy_selects_the_first_of_the_most_probable_with_its_plain_logprob() -> None:
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits[1, [4000, 77, 78]], logits[2, 4999] = 2.0, 1.0
    tokens, logprobs = sample(logits, torch.rand(3), temperature=0.0)
    assert tokens.tolist() == [0, 77, 4999]
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).amax(-1))


def test_a_row_with_nan_has_a_nan_logprob() -> None:
    logits = torch.randn(4, 1000)
    logits[0, 17], logits[1], logits[2, 999] = float("nan"), float("-inf"), float("inf")
    for filters in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        tokens, logprobs = sample(logits, torch.full((4,), 0.4), **filters)
        assert logprobs.isnan().tolist() == [True, True, True, False]
        assert ((tokens >= 0) & (tokens < 1000)).all()


def test_a_row_does_not_depend_on_other_rows() -> None:
    """A flat distribution in one row makes top-p sort the vocabulary of all rows."""
    logits, uniforms = 6 * torch.randn(7, 9001), torch.rand(7)
    logits[3] = 0.0
    for filters in ({}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}):
        together = torch.stack(sample(logits, uniforms, **filters))
        single = [torch.stack(sample(logits[i : i + 1], uniforms[i : i + 1], **filters)) for i in range(7)]
        assert torch.equal(together, torch.cat(single, 1))


def test_views_fp16_empty_batches_and_wrong_shapes() -> None:
    """Test the public function."""
    wide, uniforms = torch.randn(3, 600), torch.tensor([[0.1, 9.0], [0.5, 9.0], [0.9, 9.0]])[:, 0]
    for view in (wide[:, 7:500], wide.T.contiguous().T):
        assert torch.equal(kernels.sample(view, uniforms)[1], kernels.sample(view.clone(), uniforms.clone())[1])
    assert [len(each) for each in kernels.sample(wide[:0], uniforms[:0], top_p=0.5)] == [0, 0]
    assert torch.equal(kernels.sample(wide.half(), uniforms)[0], reference(wide.half(), uniforms, **PLAIN)[0])
    assert torch.equal(kernels.sample(wide, uniforms)[1], reference(wide, uniforms, **PLAIN)[1])
    with pytest.raises(ValueError, match=r"uniforms \(B,\)"):
        kernels.sample(wide, uniforms[:2])
