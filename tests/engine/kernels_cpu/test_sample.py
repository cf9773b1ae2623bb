"""sample in C draws what the torch path draws, whatever stands around a row and however many threads there are."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import kernels
from engine.generation.sampling import Sampling
from engine.generation.sampling import sample as plain
from engine.kernels.sample import sample as plain_sample
from engine.kernels_cpu import sample as host

pytestmark = pytest.mark.skipif(not host.available(), reason="no C compiler")
TOP = 1 - 2**-24  # the largest number there is
FILTERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.7, "min_p": 0.05}, {"min_p": 1.0},
    {"top_k": 1}, {"top_k": 5}, {"top_k": 700}, {"top_k": 10**6}, {"top_k": 10**6, "min_p": 0.1},
    {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.9, "temperature": 1.7}, {"top_p": 0.9999},
    {"top_p": 0.9, "min_p": 0.2}, {"top_k": 50, "top_p": 0.9}, {"top_k": 20, "min_p": 0.1, "temperature": 0.6},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
]  # fmt: skip
# Which of several ties, as bf16 has them, torch.topk takes is open.
CASES = [(how, dtype) for how in FILTERS for dtype in host.DTYPES if dtype == torch.float32 or "top_k" not in how]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(host, "SHARE", 1)  # small rows are shared, too
    yield request.param
    torch.set_num_threads(before)


def logits_of(rows: int, vocabulary: int, width: float, dtype: torch.dtype) -> Tensor:
    """Distinct numbers in fp32, many ties in bf16; a fifth of the tokens can't be drawn."""
    logits = width * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    if vocabulary > 5:
        logits[:, ::5] = float("-inf")
    return logits.to(dtype)


def drawn(logits: Tensor, how: Sampling, numbers: Tensor) -> Tensor:
    """(2, B): tokens over log-probabilities."""
    return torch.stack(host.draw(logits, how, numbers))


@pytest.mark.parametrize(("how", "dtype"), CASES, ids=str)
def test_draws_what_torch_draws(how: dict[str, Any], dtype: torch.dtype, threads: int) -> None:
    sampling = Sampling(1, **how)
    for vocabulary, width in product((1, 2, 255, 256, 257, 1000, 5003), (0.3, 3.0)):
        logits = logits_of(6, vocabulary, width, dtype)
        numbers = torch.tensor([0.0, 0.1, 0.37, 0.5, 0.83, 0.998])
        (ours, logprobs), (theirs, expected) = (f(logits, sampling, numbers) for f in (host.draw, plain))
        assert ours.tolist() == theirs.tolist()
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_the_rows_around_and_the_threads_do_not_matter(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHARE", 1)
    sampling, logits, numbers = Sampling(1, **how), logits_of(7, 3001, 2.0, torch.float32), torch.rand(7)
    whole, alone, before = [], [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            whole.append(drawn(logits, sampling, numbers))
            rows = [drawn(logits[row : row + 1], sampling, numbers[row : row + 1]) for row in range(7)]
            alone.append(torch.cat(rows, 1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, whole[0]) for one in whole + alone)


def test_real_vocabularies_are_inverted_as_in_float64() -> None:
    logits = logits_of(32, 50272, 3.0, torch.float32)
    numbers = torch.rand(32, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = host.draw(logits, Sampling(1, temperature=0.7), numbers)
    exact = (logits.double() / 0.7).softmax(-1)
    above = exact.cumsum(-1).gather(-1, tokens[:, None])[:, 0]
    share = exact.gather(-1, tokens[:, None])[:, 0]
    assert ((above - share - 1e-6 <= numbers) & (numbers <= above + 1e-6)).all()
    torch.testing.assert_close(logprobs.double(), share.log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [6, 700])
def test_ties_at_the_edge_of_top_k_go_by_index(vocabulary: int) -> None:
    """One token likelier than the rest, which are alike: with it the first three of those are kept."""
    logits = torch.zeros(1, vocabulary)
    logits[0, 3] = 1.0
    total = torch.tensor(1.0).exp() + 3
    for number, token in ((0.0, 3), (float((total - 2.9) / total), 0), (float((total - 1.5) / total), 1), (TOP, 2)):
        tokens, logprobs = host.draw(logits, Sampling(1, top_k=4), torch.tensor([number]))
        assert tokens.tolist() == [token]
        torch.testing.assert_close(logprobs[0], logits[0, token] - total.log())


def test_no_token_without_probability_is_drawn() -> None:
    logits = torch.full((4, 900), float("-inf"))
    logits[:, 300], logits[:, 700] = -0.0, 0.0
    for how in ({}, {"top_p": 0.99}, {"top_k": 5}, {"min_p": 0.5}, {"temperature": 1e37}):
        tokens, logprobs = host.draw(logits, Sampling(1, **how), torch.tensor([0.0, 0.49, 0.5, TOP]))
        assert tokens.tolist() == [300, 300, 700, 700]
        torch.testing.assert_close(logprobs, torch.full((4,), -0.6931472))


def test_what_is_no_number_shows_in_the_logprob_of_its_row_alone() -> None:
    logits = torch.randn(4, 1000)
    logits[0, 17], logits[1], logits[2, 999] = float("nan"), float("-inf"), float("inf")
    for how in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        tokens, logprobs = host.draw(logits, Sampling(1, **how), torch.full((4,), 0.4))
        assert logprobs.isnan().tolist() == [True, True, True, False]
        assert ((tokens >= 0) & (tokens < 1000)).all()


def test_logits_may_be_views() -> None:
    wide = logits_of(3, 600, 2.0, torch.float32)
    how, numbers = Sampling(1, top_p=0.9), torch.tensor([[0.1, 9.0], [0.5, 9.0], [0.9, 9.0]])[:, 0]
    for view in (wide[:, 7:500], wide.T.contiguous().T):
        assert torch.equal(drawn(view, how, numbers), drawn(view.clone(), how, numbers))
    assert [len(each) for each in host.draw(wide[:0], how, numbers[:0])] == [0, 0]
    with pytest.raises(ValueError, match="do not fit"):
        host.draw(wide, how, numbers[:2])


def test_the_names_pick_it_and_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, streams, how = logits_of(3, 600, 2.0, torch.float32), torch.arange(3), Sampling(1, top_k=9, seed=4)
    expected = plain_sample(logits, streams, streams, how)
    assert torch.equal(kernels.sample(logits, streams, streams, how)[0], expected[0])
    monkeypatch.setattr(host, "_function", lambda: None)
    assert torch.equal(kernels.sample(logits, streams, streams, how)[1], expected[1])
    numbers = torch.tensor([0.2, 0.4, 0.6])
    assert torch.equal(kernels.draw(logits, how, numbers)[1], plain(logits, how, numbers)[1])
    assert torch.equal(kernels.draw(logits.half(), how, numbers)[0], plain(logits.half(), how, numbers)[0])
