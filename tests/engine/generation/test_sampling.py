"""Sampling: the numbers drawn, the distribution they are turned into, and its log-probabilities."""

import math

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

from engine.generation.sampling import Ending, Sampling, forbid, penalise, sample, uniforms
from engine.kernels_cpu import sample as host

ONE = Sampling(max_new_tokens=1)


def splitmix(x: int) -> int:
    """splitmix64's output function on unsigned Python integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64() -> None:
    """The first output of splitmix64 seeded with 1234567 is published with the algorithm."""
    assert splitmix(1234567) == 6457827717110365317


@pytest.mark.parametrize("seed", [0, 7, 2**62 + 12345, -3])
def test_uniforms_equal_unsigned_arithmetic(seed: int) -> None:
    streams = torch.tensor([0, 1, 5, 2**40, -1])
    for position in (0, 1, 1000):
        expected = []
        for stream in streams.tolist():
            state = splitmix((splitmix(seed % 2**64) + stream) % 2**64)
            expected.append((splitmix((state + position) % 2**64) >> 40) / 2**24)
        assert uniforms(seed, streams, position).tolist() == expected


def test_uniforms_of_a_table_equal_those_of_its_cells() -> None:
    streams = torch.arange(5)
    table = uniforms(3, streams[:, None], torch.arange(4))
    assert table.shape == (5, 4)
    for position in range(4):
        assert torch.equal(table[:, position], uniforms(3, streams, position))


def test_uniforms_are_even_and_unrelated() -> None:
    """Neighbouring seeds, streams and positions: flat histogram, no correlation (5 sigma)."""
    table = torch.stack([uniforms(seed, torch.arange(100)[:, None], torch.arange(100)) for seed in range(10)])
    assert table.min() >= 0 and table.max() < 1
    counts = torch.histc(table, bins=64, min=0, max=1)
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 63 + 5 * math.sqrt(2 * 63)
    for first, second in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[:, :, 1:], table[:, :, :-1])):
        pair = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / math.sqrt(pair.shape[1])


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def draws(logits: Tensor, sampling: Sampling, count: int = 40000) -> tuple[Tensor, Tensor]:
    rows = logits.expand(count, -1)
    return sample(rows, sampling, uniforms(sampling.seed, torch.arange(count), 0))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (0.8, 0, 0.7, 0.0),
        (1.3, 9, 0.8, 0.0),
        (1.3, 0, 1.0, 0.2),
        (0.9, 12, 0.95, 0.1),
    ],
)
def test_tokens_follow_the_filtered_softmax(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(1)
    logits = 1.5 * torch.randn(20)
    expected = filtered(logits, temperature, top_k, top_p, min_p)
    tokens, logprobs = draws(logits, Sampling(1, temperature, top_k, top_p, min_p=min_p, seed=11))
    kept = expected > 0
    counts = torch.bincount(tokens, minlength=20)
    assert counts[~kept].sum() == 0
    freedom = int(kept.sum()) - 1
    assert chi_square(counts[kept], expected[kept]) < freedom + 5 * math.sqrt(2 * freedom)
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=2e-6, rtol=0)


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution by definition, float64, token by token."""
    scaled = (logits.double() / temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    order = order[:top_k] if top_k else order
    total = sum(math.exp(scaled[i]) for i in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p:
            break
        if math.exp(scaled[token] - scaled[order[0]]) < min_p:
            break
        kept.append(token)
        mass += math.exp(scaled[token]) / total
    result = torch.zeros(len(scaled), dtype=torch.float64)
    for token in kept:
        result[token] = math.exp(scaled[token]) / total / mass
    return result


@pytest.mark.parametrize(
    "how",
    [
        Sampling(9, temperature=0.7, top_k=12, top_p=0.8, min_p=0.05),
        Sampling(9, temperature=1.6, top_p=0.9, min_p=0.1),
        Sampling(9, top_k=5, min_p=0.3),
        Sampling(9, temperature=1.3, min_p=0.02),
    ],
)
def test_penalty_minimum_and_filters_are_those_of_transformers(how: Sampling) -> None:
    """In the order in which `generate` has them."""
    torch.manual_seed(2)
    logits, ids, ends = 2 * torch.randn(1, 60), torch.tensor([[3, 9, 9, 41, 17]]), [4, 8, 50]
    logits[0, [3, 4, 50]] = torch.tensor([6.0, 7.0, 5.0])
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), MinNewTokensLengthLogitsProcessor(3, 4, ends)])
    theirs += [TemperatureLogitsWarper(how.temperature), *([TopKLogitsWarper(how.top_k)] if how.top_k else [])]
    theirs += [TopPLogitsWarper(how.top_p), MinPLogitsWarper(how.min_p)]
    expected = theirs(ids, logits.clone()).softmax(-1)[0]  # type: ignore[arg-type]
    seen = torch.zeros(1, 60, dtype=torch.bool).index_fill_(1, ids[0], True)
    ours = penalise(forbid(logits.clone(), tuple(ends)), seen, 1.4).expand(4000, -1)
    for function in (sample, *([host.draw] if host.available() else [])):
        tokens, logprobs = function(ours, how, torch.arange(4000) / 4000)
        drawn = torch.bincount(tokens, minlength=60) > 0
        assert not (drawn & (expected == 0)).any() and (drawn | (expected < 4e-4)).all()
        torch.testing.assert_close(logprobs, expected.log()[tokens], atol=2e-5, rtol=0)


def test_the_first_of_the_likeliest_is_greedy() -> None:
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits[1, [4000, 77, 78]], logits[2, 4999] = 2.0, 1.0
    for function in (sample, *([host.draw] if host.available() else [])):
        tokens, _ = function(logits, Sampling(1, temperature=0), torch.rand(3))
        assert tokens.tolist() == [0, 77, 4999]


def test_a_token_without_probability_is_never_drawn() -> None:
    """At both ends of [0, 1) and in the middle, whatever the zeros around."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf, 0.0, -torch.inf]]).expand(5, -1)
    tokens, logprobs = sample(logits, ONE, torch.tensor([0.0, 0.49999, 0.5, 0.99, 1 - 2**-24]))
    assert tokens.tolist() == [1, 1, 4, 4, 4]
    torch.testing.assert_close(logprobs, torch.full((5,), math.log(0.5)))


def test_the_last_uniform_stays_inside_for_any_total() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(2000, 37)
    logits[:, 30:] = -torch.inf
    tokens, _ = sample(logits, ONE, torch.full((2000,), 1 - 2**-24))
    assert tokens.max() < 30


def test_greedy_takes_the_likeliest_with_its_plain_logprob() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    tokens, logprobs = sample(logits, Sampling(1, temperature=0), torch.rand(6))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_a_small_top_p_leaves_the_likeliest() -> None:
    tokens, logprobs = draws(torch.tensor([0.0, 5.0, 1.0]), Sampling(1, top_p=1e-6), count=100)
    assert set(tokens.tolist()) == {1} and logprobs.abs().max() < 1e-6


def test_sixteen_bit_logits_are_sampled_in_fp32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 500).bfloat16()
    tokens, logprobs = draws(logits, ONE, count=50)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), logits.double().log_softmax(-1)[0, tokens], atol=1e-5, rtol=0)


def test_forbidden_tokens_are_gone() -> None:
    tokens, _ = sample(forbid(torch.zeros(4, 3), (0, 2)), ONE, torch.tensor([0.0, 0.3, 0.6, 0.99]))
    assert tokens.tolist() == [1, 1, 1, 1]


def test_logits_that_are_no_numbers_show_in_the_logprob() -> None:
    for sampling in (ONE, Sampling(1, temperature=0), Sampling(1, top_k=2)):
        _, logprobs = sample(torch.full((2, 4), torch.nan), sampling, torch.tensor([0.1, 0.9]))
        assert logprobs.isnan().all()


def test_the_penalty_pulls_seen_tokens_down_on_both_sides_of_zero() -> None:
    logits = torch.tensor([[3.0, 3.0, -2.0, -2.0, 0.0]])
    seen = torch.tensor([[True, False, True, False, True]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.5, 3.0, -4.0, -2.0, 0.0]]


def letters(token_ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in token_ids)


def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    ending = Ending(Sampling(99, end_ids=(25,), stop=("cab", "x")), letters)
    assert [ending(0, token) for token in (2, 0, 2, 0, 1)] == [False] * 4 + [True]
    assert [ending(1, token) for token in (0, 1, 25)] == [False, False, True]
    assert [ending(2, token) for token in (2, 0)] == [False] * 2  # another answer's tokens don't count
    assert ending.ended == {0, 1}


def test_a_stop_string_within_a_token_counts_and_one_before_the_minimum_does_not() -> None:
    ending = Ending(Sampling(99, stop=("b c",), min_new_tokens=2), lambda ids: "".join(f"a{i}b c" for i in ids))
    assert not ending(0, 7)
    assert ending(0, 8)


def test_stop_strings_need_text() -> None:
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
        ("stop", ("x", "")),
    ],
)
def test_bad_settings_are_named(key: str, value: float | tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=key):
        Sampling(**({"max_new_tokens": 4} | {key: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [4095, 4096, 5000, 50257])
def test_large_vocabularies_are_inverted_as_in_float64(size: int) -> None:
    """Vocabularies on either side of where blocks are summed first, whole and with a rest."""
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(64, size, generator=generator)
    logits[:, ::7] = float("-inf")
    draws = torch.rand(64, generator=generator)
    tokens, logprobs = sample(logits, Sampling(1, temperature=0.7), draws)
    exact = (logits.double() / 0.7).softmax(-1)
    cumulative = exact.cumsum(-1)
    above = cumulative.gather(-1, tokens[:, None])[:, 0]
    below = above - exact.gather(-1, tokens[:, None])[:, 0]
    assert ((below - 2e-6 <= draws) & (draws <= above + 2e-6)).all()
    assert (tokens % 7 != 0).all()
    torch.testing.assert_close(logprobs.double(), exact.gather(-1, tokens[:, None])[:, 0].log(), atol=2e-5, rtol=0)


def test_the_ends_of_large_vocabularies_are_drawn() -> None:
    """The first and the last number of a stream fall on the first and the last token that can be drawn."""
    logits = torch.zeros(2, 5000)
    logits[:, :300], logits[:, 4990:] = float("-inf"), float("-inf")
    tokens, _ = sample(logits, ONE, torch.tensor([0.0, 1 - 2**-24]))
    assert tokens.tolist() == [300, 4989]
