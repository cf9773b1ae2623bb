"""The Triton source of `sample` against the torch reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.sample import reference
from engine.kernels_triton import sample as kernel
from tests.engine.kernels.oracle import DEVICE, PLAIN

ROUNDING = 5e-6 if DEVICE == "cpu" else 2e-5  # a GPU's exponential has errors of 2^-22
FILTERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.6, "min_p": 0.1}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 10**6},
    {"top_p": 0.99, "min_p": 0.3}, {"top_k": 200, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
]  # fmt: skip


def compare(logits: Tensor, filters: dict[str, Any]) -> None:
    uniforms = torch.linspace(0, 0.998, len(logits), device=DEVICE)
    tokens, logprobs = kernel.sample(logits, uniforms, **{**PLAIN, **filters})
    expected, expected_logprobs = reference(logits, uniforms, **{**PLAIN, **filters})
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equals_torch(filters: dict[str, Any]) -> None:
    """The vocabulary has more than one tile, and the last tile is incomplete."""
    torch.manual_seed(3)
    compare(3 * torch.randn(4, 5003, device=DEVICE), filters)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_p": 0.99, "min_p": 0.3}], ids=str)
def test_ties_are_ordered_by_token_id(monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]) -> None:
    monkeypatch.setattr(kernel, "TILE", 128)
    torch.manual_seed(3)
    compare(torch.randint(-3, 4, (5, 300), device=DEVICE).to(torch.bfloat16), filters)


def test_ties_at_the_limit_of_top_k_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TILE", 4)
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, -9.0]], device=DEVICE).repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.5, 0.7, 0.9], device=DEVICE)
    tokens, logprobs = kernel.sample(logits, uniforms, **{**PLAIN, "top_k": 4})
    assert tokens.tolist() == [0, 1, 2, 3]
    total = torch.tensor(1.0).exp() + 3
    torch.testing.assert_close(logprobs.cpu(), logits[0, tokens].cpu() - total.log(), atol=ROUNDING, rtol=0)


def test_forbidden_tokens_and_nan() -> None:
    logits = torch.full((4, 5000), float("-inf"), device=DEVICE)
    logits[:, 4321] = 2.0
    logits[1, 17] = torch.tensor(float("nan")).copysign(torch.tensor(-1.0))  # the NaN of 0 / 0 has this sign
    logits[2, 17], logits[3] = float("inf"), float("-inf")
    for filters in ({}, {"min_p": 0.5}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}):
        tokens, logprobs = kernel.sample(logits, torch.full((4,), 0.4, device=DEVICE), **{**PLAIN, **filters})
        assert tokens[0] == 4321 and logprobs[0].abs() < ROUNDING
        assert logprobs.isnan().tolist() == [False, True, True, True] and ((tokens >= 0) & (tokens < 5000)).all()


def test_no_rows() -> None:
    empty = kernel.sample(torch.zeros(0, 5, device=DEVICE), torch.zeros(0, device=DEVICE), **PLAIN)
    assert [len(each) for each in empty] == [0, 0]
