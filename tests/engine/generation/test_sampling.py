"""Sampling settings, the random numbers of sampling (splitmix64), and the end of an answer."""

import math

import pytest
import torch
from torch import Tensor

from engine.generation.sampling import Ending, Sampling, combine_seeds, penalise, uniforms
from engine.kernels import sample


def splitmix(x: int) -> int:
    """Compute splitmix64's output function on unsigned Python integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64() -> None:
    """Compare with the published first output for the seed 1234567."""
    assert splitmix(1234567) == 6457827717110365317


def seeds_of(seed: int, sample_seeds: torch.Tensor) -> torch.Tensor:
    return torch.tensor([combine_seeds(seed, each) for each in sample_seeds.tolist()])


@pytest.mark.parametrize("seed", [0, 7, 2**62 + 12345, -3])
def test_uniforms_equal_unsigned_arithmetic(seed: int) -> None:
    streams = torch.tensor([0, 1, 5, 2**40, -1])
    for position in (0, 1, 1000):
        expected = []
        for stream in streams.tolist():
            state = splitmix((splitmix(seed % 2**64) + stream) % 2**64)
            expected.append((splitmix((state + position) % 2**64) >> 40) / 2**24)
        assert uniforms(seeds_of(seed, streams), position).tolist() == expected


def test_uniforms_are_flat_and_uncorrelated() -> None:
    """Numbers of neighbouring seeds, streams and positions have a flat histogram and no correlation (5 sigma)."""
    table = torch.stack([uniforms(seeds_of(seed, torch.arange(100))[:, None], torch.arange(100)) for seed in range(10)])
    assert table.min() >= 0 and table.max() < 1
    counts = torch.histc(table, bins=64, min=0, max=1)
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 63 + 5 * math.sqrt(2 * 63)
    for first, second in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[:, :, 1:], table[:, :, :-1])):
        pair = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / math.sqrt(pair.shape[1])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def test_forbidden_tokens_have_probability_zero() -> None:
    logits = torch.zeros(4, 3).index_fill(1, torch.tensor([0, 2]), float("-inf"))
    tokens, _ = sample(logits, torch.tensor([0.0, 0.3, 0.6, 0.99]))
    assert tokens.tolist() == [1, 1, 1, 1]


def test_the_penalty_lowers_positive_and_negative_logits() -> None:
    logits = torch.tensor([[3.0, 3.0, -2.0, -2.0, 0.0]])
    seen = torch.tensor([[True, False, True, False, True]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.5, 3.0, -4.0, -2.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_penalty_is_not_rounded_to_the_precision_of_the_model(dtype: torch.dtype) -> None:
    logits = torch.linspace(-40, 40, 50).to(dtype)[None]
    expected = torch.where(logits > 0, logits.double() / 1.1, logits.double() * 1.1)
    actual = penalise(logits, torch.ones_like(logits, dtype=torch.bool), 1.1)
    torch.testing.assert_close(actual.double(), expected, atol=0, rtol=1e-6)


def letters(token_ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in token_ids)


def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    ending = Ending(Sampling(99, end_ids=(25,), stop=("cab", "x")), letters)
    assert [ending(0, token) for token in (2, 0, 2, 0, 1)] == [False] * 4 + [True]
    assert [ending(1, token) for token in (0, 1, 25)] == [False, False, True]
    assert [ending(2, token) for token in (2, 0)] == [False] * 2  # the tokens of another answer do not count


def test_a_stop_string_within_a_token_counts_and_one_before_the_minimum_does_not() -> None:
    ending = Ending(Sampling(99, stop=("b c",), min_new_tokens=2), lambda ids: "".join(f"a{i}b c" for i in ids))
    assert not ending(0, 7)
    assert ending(0, 8)


def test_stop_strings_need_a_decoder() -> None:
    with pytest.raises(ValueError, match="text="):
        Ending(Sampling(9, stop=("a",)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_new_tokens", 5),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 100_001.0),
        ("stop", ("x", "")),
    ],
)
def test_invalid_settings_are_refused(key: str, value: float | tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=key):
        Sampling(**({"max_new_tokens": 4} | {key: value}))  # type: ignore[arg-type]


def test_the_largest_repetition_penalty_is_accepted() -> None:
    assert Sampling(4, repetition_penalty=1e5).repetition_penalty == 1e5
