"""A head split over ranks: log-probabilities, entropies and gradients are those of the whole head in float64."""

import pytest
import torch
from torch import Tensor

from engine.kernels import Reduce, split_token_logprobs
from engine.kernels import token_logprobs as by_name
from engine.parallel import collectives, dist
from tests.engine.kernels.oracle import close, in_float64, make
from tests.ranks import run_ranks

TOKENS, VOCABULARY, WIDTH = 37, 610, 24
CASES = [(torch.float32, 0.7, 3.0, True), (torch.bfloat16, 1.0, None, False)]


def whole(dtype: torch.dtype, bias: bool) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor, Tensor]:
    leaves = make(TOKENS, VOCABULARY, WIDTH, bias=bias, dtype=dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    return leaves, targets, torch.randn(2, TOKENS)


def on_ranks() -> list[list[Tensor]]:
    """Per case: log-probabilities, entropies, gradients of hidden, rows and bias; uneven shares."""
    torch.set_num_threads(1)
    reduce = Reduce(collectives.all_reduce_max, collectives.all_reduce_sum)
    first, last = ((0, 200), (200, VOCABULARY))[dist.world().rank]
    results = []
    for dtype, temperature, softcap, bias in CASES:
        (hidden, weight, biases), targets, upstream = whole(dtype, bias)
        rows = weight.detach()[first:last].clone().requires_grad_()
        shift = None if biases is None else biases.detach()[first:last].clone().requires_grad_()
        outputs = split_token_logprobs(hidden, rows, targets, first, reduce, temperature, shift, softcap)
        torch.autograd.backward(outputs, [upstream[0], upstream[1]])
        results.append([*(o.detach() for o in outputs), *(x.grad for x in (hidden, rows, shift) if x is not None)])
    return results


@pytest.fixture(scope="module")
def ranks() -> list[list[list[Tensor]]]:
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_two_ranks_give_what_the_whole_head_gives(case: int, ranks: list[list[list[Tensor]]]) -> None:
    dtype, temperature, softcap, bias = CASES[case]
    leaves, targets, upstream = whole(dtype, bias)
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


def test_one_rank_with_all_rows_is_the_plain_kernel() -> None:
    (hidden, weight, _), targets, _ = whole(torch.float32, False)
    alone = Reduce(lambda t: t, lambda t: t)
    for mine, theirs in zip(
        split_token_logprobs(hidden, weight, targets, 0, alone), by_name(hidden, weight, targets), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
