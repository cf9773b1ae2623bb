"""The Triton source of sample draws the tokens of the torch path, whose own tests are in tests/engine/generation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.generation.sampling import Sampling, uniforms
from engine.kernels.sample import sample as plain
from engine.kernels_triton import sample as kernel
from tests.engine.kernels.oracle import DEVICE

ROUNDING = 5e-6 if DEVICE == "cpu" else 2e-5  # a GPU's exponential is good to 2^-22
FILTERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.7}, {"top_k": 20, "top_p": 0.9, "min_p": 0.2, "temperature": 0.8},
]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds to sort thousands."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernel, "room_for", lambda top_k: 128 if top_k else 256)


def draw(function: Any, logits: Tensor, streams: Tensor, **filters: Any) -> tuple[Tensor, Tensor]:
    tokens, logprobs = function(logits, streams, 3 * streams % 11, Sampling(max_new_tokens=1, seed=5, **filters))
    return tokens, logprobs


@pytest.mark.parametrize(("index", "filters"), list(enumerate(FILTERS)), ids=str)
def test_draws_what_torch_draws(index: int, filters: dict[str, Any]) -> None:
    vocabulary = (50272 // 16, 151936 // 32)[index % 2]
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(2, vocabulary, device=DEVICE)
    streams = torch.arange(2, device=DEVICE) * 1_000_003
    ours, theirs = draw(kernel.sample, logits, streams, **filters), draw(plain, logits, streams, **filters)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_p": 0.99, "min_p": 0.3}], ids=str)
def test_ties_go_by_index(monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]) -> None:
    monkeypatch.setattr(kernel, "TILE", 128)
    monkeypatch.setattr(kernel, "SCAN", 64)
    logits = torch.randint(-3, 4, (5, 300), device=DEVICE).to(torch.bfloat16)
    streams = torch.arange(5, device=DEVICE)
    ours, theirs = draw(kernel.sample, logits, streams, **filters), draw(plain, logits, streams, **filters)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], atol=ROUNDING, rtol=0)


def test_ties_at_the_edge_of_top_k_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of one weight, three places: which of them torch.topk takes is open, the shares are not."""
    monkeypatch.setattr(kernel, "TILE", 64)
    monkeypatch.setattr(kernel, "SCAN", 4)
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, -9.0]], device=DEVICE).repeat(5, 1)
    tokens, logprobs = draw(kernel.sample, logits, torch.arange(5, device=DEVICE), top_k=4)
    total = torch.tensor(1.0).exp() + 3
    assert set(tokens.tolist()) <= {0, 1, 2, 3} and len(set(tokens.tolist())) > 1
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(float(logits[0, token] - total.log()), abs=ROUNDING)


@pytest.mark.parametrize(
    ("filters", "width", "few"),
    [
        ({"top_k": 40, "top_p": 0.9}, 1.0, True),
        ({"top_k": 40, "min_p": 0.1, "temperature": 0.7}, 1.0, True),
        ({"top_k": 200}, 1.0, False),
        ({"top_p": 0.7}, 5.0, True),
        ({"top_p": 0.9}, 0.2, False),
        ({"top_p": 0.99, "min_p": 0.3}, 2.0, True),
    ],
    ids=str,
)
def test_few_candidates_are_sorted_and_many_searched(
    monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any], width: float, few: bool
) -> None:
    monkeypatch.setattr(kernel, "room_for", lambda top_k: 128 if top_k else 256)
    searched = kernel.search_kernel
    settled: list[Tensor] = []

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def call(*args: Any, **constants: Any) -> None:
                settled.append(args[searched.arg_names.index("settled")].clone())
                searched[grid](*args, **constants)

            return call

    monkeypatch.setattr(kernel, "search_kernel", Watched())
    torch.manual_seed(1)
    logits, streams = width * torch.randn(3, 151936 // 32, device=DEVICE), torch.arange(3, device=DEVICE)
    ours, theirs = draw(kernel.sample, logits, streams, **filters), draw(plain, logits, streams, **filters)
    assert settled[0].tolist() == [int(few)] * 3
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], atol=ROUNDING, rtol=0)


def test_the_number_is_that_of_the_stream() -> None:
    """With equal logits the token is the floor of u times the vocabulary: it shows the random number itself."""
    streams = torch.tensor([0, 1, -7, 2**62, 12345678901], device=DEVICE)
    positions = torch.tensor([0, 5, 2**40, 1, 77], device=DEVICE)
    for seed in (0, 1, 2**63 + 5):
        how = Sampling(max_new_tokens=1, seed=seed)
        tokens, _ = kernel.sample(torch.zeros(5, 1024, device=DEVICE), streams, positions, how)
        assert torch.equal(tokens, (uniforms(seed, streams, positions) * 1024).long())


def test_forbidden_tokens_and_nan() -> None:
    logits = torch.full((2, 5000), float("-inf"), device=DEVICE)
    logits[:, 4321] = 2.0
    for filters in ({}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}):
        tokens, logprobs = draw(kernel.sample, logits, torch.arange(2, device=DEVICE), **filters)
        assert tokens.tolist() == [4321, 4321] and logprobs.abs().max() < ROUNDING
    logits[1, 17] = torch.tensor(float("nan")).copysign(torch.tensor(-1.0))  # as 0 / 0 gives; orders below all else
    for filters in ({}, {"min_p": 0.5}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}):
        tokens, logprobs = draw(kernel.sample, logits, torch.arange(2, device=DEVICE), **filters)
        assert logprobs.isnan().tolist() == [False, True] and 0 <= int(tokens[1]) < 5000


def test_bad_arguments_are_named() -> None:
    streams = torch.arange(2)
    with pytest.raises(ValueError, match="do not fit"):
        draw(plain, torch.zeros(3, 4), streams)
    with pytest.raises(ValueError, match="int64"):
        draw(plain, torch.zeros(2, 4), streams.int())
