"""token_logprobs against float64 autograd, with random upstream gradients for both outputs."""

import importlib
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.kernels import VocabularyShard, token_logprobs
from engine.kernels.products import Products, products_of
from engine.parallel import collectives, dist
from tests.engine.kernels.oracle import close, compare_with_float64, in_float64, make
from tests.ranks import run_ranks

kernel = importlib.import_module("engine.kernels.token_logprobs")


@pytest.mark.parametrize(("blocks", "bias", "softcap"), [(1, False, None), (1, True, 3.0), (5, True, 3.0)])
def test_values_and_gradients_match_float64(
    monkeypatch: pytest.MonkeyPatch, blocks: int, bias: bool, softcap: float | None
) -> None:
    tokens, vocabulary = 37, 101
    monkeypatch.setattr(kernel, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", {"cpu": tokens * -(-vocabulary // blocks)})
    targets = torch.randint(vocabulary, (tokens,))
    targets[:2] = torch.tensor([0, vocabulary - 1])
    compare_with_float64(make(tokens, vocabulary, 13, bias=bias), targets, 0.7, softcap, tolerances=(1e-6, 1e-5))


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_a_single_output(which: int) -> None:
    compare_with_float64(make(11, 29, 8), torch.randint(29, (11,)), outputs=[which], tolerances=(1e-6, 1e-5))


@pytest.mark.parametrize("width", [300, 37])
def test_bf16_keeps_its_logits_in_fp32(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Logits rounded to bf16 have errors of about 1e-2. fp32 sums of bf16 inputs have errors of about 1e-6."""
    monkeypatch.setattr(kernel, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", {"cpu": 64 * width})
    leaves = make(64, 1000, 96, dtype=torch.bfloat16)
    compare_with_float64(leaves, torch.randint(1000, (64,)), tolerances=(1e-5, 8e-3))  # bf16 has 8 bits
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16", "the setting was not restored"


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _ = make(5, 17, 4)
    token_logprobs(hidden, weight.detach(), torch.arange(5))[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_at_most_one_block_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def watched(hidden: Tensor, weight: Tensor) -> Products:
        products = products_of(hidden, weight)

        def multiply(a: Tensor, b: Tensor) -> Tensor:
            widths.append(b.shape[1])  # hidden x head, in the forward and again in the backward
            return products.multiply(a, b)

        return products._replace(multiply=multiply)

    monkeypatch.setattr(kernel, "products_of", watched)
    monkeypatch.setattr(kernel, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", {"cpu": 64 * 100})
    hidden, weight, _ = make(64, 1050, 8)
    logprobs, _ = token_logprobs(hidden, weight, torch.randint(1050, (64,)))
    saved = [t for t in logprobs.grad_fn.saved_tensors if t is not None and t.dtype == torch.float32]  # type: ignore[union-attr]
    assert max(t.numel() for t in saved) == weight.numel(), "a tensor as large as the logits is saved for the backward"
    logprobs.sum().backward()
    assert len(widths) == 22 and max(widths) <= 100 and sum(widths) == 2 * 1050


def test_no_tokens() -> None:
    hidden, weight, _ = make(0, 7, 3)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_targets_outside_of_the_vocabulary_give_nan() -> None:
    hidden, weight, _ = make(3, 7, 2)
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([6, 7, -1]))
    assert logprobs.isnan().tolist() == [False, True, True]


def test_bad_arguments_are_named() -> None:
    hidden, weight, _ = make(3, 7, 2)
    with pytest.raises(ValueError, match="hidden must be"):
        token_logprobs(hidden, weight, torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, weight, torch.zeros(3, dtype=torch.long), temperature=0.0)


TOKENS, VOCABULARY, WIDTH = 37, 610, 24
SHARDED = [(torch.float32, 0.7, 3.0, True), (torch.bfloat16, 1.0, None, False)]


def all_rows(dtype: torch.dtype, bias: bool) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor, Tensor]:
    leaves = make(TOKENS, VOCABULARY, WIDTH, bias=bias, dtype=dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    return leaves, targets, torch.randn(2, TOKENS)


def on_rank() -> list[list[Tensor]]:
    """Return log-probabilities, entropies and gradients of hidden, rows and bias for each case. Shards are uneven."""
    torch.set_num_threads(1)
    first, last = ((0, 200), (200, VOCABULARY))[dist.world().rank]
    shard = VocabularyShard(first, partial(collectives.all_reduce, op="max"), collectives.all_reduce)
    results = []
    for dtype, temperature, softcap, bias in SHARDED:
        (hidden, weight, biases), targets, upstream = all_rows(dtype, bias)
        rows = weight.detach()[first:last].clone().requires_grad_()
        shift = None if biases is None else biases.detach()[first:last].clone().requires_grad_()
        outputs = token_logprobs(hidden, rows, targets, temperature, shift, softcap, shard)
        torch.autograd.backward(outputs, [upstream[0], upstream[1]])
        results.append([*(o.detach() for o in outputs), *(x.grad for x in (hidden, rows, shift) if x is not None)])
    return results


def test_a_head_sharded_over_two_ranks() -> None:
    ranks = run_ranks(on_rank, 2)
    for case, (dtype, temperature, softcap, bias) in enumerate(SHARDED):
        leaves, targets, upstream = all_rows(dtype, bias)
        exact, logprobs, entropy = in_float64(leaves, targets, temperature, softcap)
        torch.autograd.backward([logprobs, entropy], [upstream[0].double(), upstream[1].double()])
        of_values, of_gradients = (2e-6, 2e-5) if dtype == torch.float32 else (1e-5, 8e-3)
        one, other = (rank[case] for rank in ranks)
        for mine in (one, other):
            close(mine[0], logprobs.detach(), of_values)
            close(mine[1], entropy.detach(), of_values)
            assert exact[0].grad is not None and mine[2].dtype == dtype
            close(mine[2], exact[0].grad, of_gradients)
        for part, leaf in enumerate(exact[1:], start=3):
            if leaf is not None and leaf.grad is not None:
                close(torch.cat([one[part], other[part]]), leaf.grad, of_gradients)
