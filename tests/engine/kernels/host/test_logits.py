"""The passes over logits in C against definitions in float64, and against the operators that serve without them."""

import importlib

import pytest
import torch

from engine.kernels import token_logprobs
from engine.kernels.host import logits
from tests.engine.kernels.oracle import close, make

kernel = importlib.import_module("engine.kernels.token_logprobs")

pytestmark = pytest.mark.skipif(not logits.serves(torch.zeros(1, 1)), reason="there is no C compiler")


@pytest.mark.parametrize("width", [1, 63, 1024, 2503])  # within and beyond what is summed at a time, dividing or not
def test_sums_and_slopes_match_float64(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(logits, "team", lambda numbers: 2)
    z = 10 * torch.randn(4, width)
    z[0, -1] = z[0].amax() + 1  # the highest stands last
    z[1, 0] = 60.0  # the others far below it
    of_logprob, of_entropy, targets = torch.randn(4), torch.randn(4), torch.tensor([width - 1, -1, width, width // 2])
    wide, g, e = z.double(), of_logprob[:, None].double(), of_entropy[:, None].double()

    highest, weights, pulls = logits.sums(z)
    below = wide - wide.amax(-1, keepdim=True)
    assert torch.equal(highest, z.amax(-1))
    close(weights, below.exp().sum(-1), 1e-6)
    close(pulls, (below.exp() * below).sum(-1), 1e-6)

    logp = wide.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = (torch.arange(width) == targets[:, None]).double()
    told = (targets, wide.logsumexp(-1).float(), entropy.float(), of_logprob)
    of_both = g * (chosen - logp.exp()) - e * logp.exp() * (logp + entropy[:, None])
    close(logits.slopes(z, *told, None, torch.empty(4, width)), g * (chosen - logp.exp()), 1e-5)
    close(logits.slopes(z, *told, of_entropy, torch.empty(4, width)), of_both, 1e-5)


def test_what_is_not_a_number_shows() -> None:
    z = torch.zeros(2, 70)
    z[0, 69] = torch.nan
    highest, weights, pulls = logits.sums(z)
    assert not torch.isfinite(weights[0]) and not torch.isfinite(pulls[0])
    assert highest[1] == 0 and weights[1] == 70 and pulls[1] == 0


def test_a_token_of_probability_zero_counts_for_nothing() -> None:
    z = torch.tensor([[0.0, -torch.inf]])
    _, weights, pulls = logits.sums(z)
    assert weights == 1 and abs(pulls) < 1e-30
    nothing, one = torch.zeros(1), torch.ones(1)
    slopes = logits.slopes(z, torch.zeros(1, dtype=torch.long), nothing, nothing, one, one, torch.empty(1, 2))
    assert slopes.abs().max() < 1e-30


def test_operators_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SMALLEST_BLOCK", 30)
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", {"cpu": 1})
    found = []
    for in_c in (True, False):
        torch.manual_seed(3)
        leaves, targets, upstream = make(7, 101, 13), torch.arange(7) * 15, torch.randn(2, 7)
        with monkeypatch.context() as patch:
            if not in_c:
                patch.setattr(kernel.host, "serves", lambda z: False)
            outputs = token_logprobs(leaves[0], leaves[1], targets)
            torch.autograd.backward(outputs, [*upstream])
        found.append([*outputs, leaves[0].grad, leaves[1].grad])
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs.double(), 1e-6)
