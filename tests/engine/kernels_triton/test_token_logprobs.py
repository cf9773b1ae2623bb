"""The Triton source of token_logprobs against float64, with random upstream gradients for both outputs."""

import importlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.kernels import VocabularyShard, token_logprobs
from engine.kernels_triton import token_logprobs as kernel
from tests.engine.kernels.oracle import DEVICE, Leaves, close, compare_with_float64, in_float64, make

plain = importlib.import_module("engine.kernels.token_logprobs")
# fp32 is exact to its sums; in bf16 the gradient of the logits is rounded once and the result once, 8 bits each.
TOLERANCE = {torch.float32: (2e-6 if DEVICE == "cpu" else 1e-5, 2e-5), torch.bfloat16: (1e-5, 6e-3)}


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_implementation", lambda hidden: (kernel.reduce_block, kernel.block_gradient))


def on_device(leaves: Leaves) -> Leaves:
    hidden, weight, bias = (None if x is None else x.detach().to(DEVICE).requires_grad_() for x in leaves)
    assert hidden is not None and weight is not None
    return hidden, weight, bias


def compare(
    tokens: int, vocabulary: int, width: int, dtype: torch.dtype, *, temperature: float = 1.0, bias: bool = False,
    softcap: float | None = None, outputs: Sequence[int] = (0, 1),
) -> None:  # fmt: skip
    leaves = on_device(make(tokens, vocabulary, width, bias=bias, dtype=dtype))
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    targets[:2] = torch.tensor([0, vocabulary - 1])[:tokens]
    compare_with_float64(leaves, targets, temperature, softcap, outputs=outputs, tolerances=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 37])
def test_values_and_gradients_match_float64(tokens: int, dtype: torch.dtype) -> None:
    compare(tokens, 610, 77, dtype, temperature=0.7, bias=True, softcap=3.0)


@pytest.mark.parametrize("vocabulary", [50272 // 16, 151936 // 32])
def test_vocabularies_of_real_models_scaled_down(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 70 * 1024))  # several blocks
    compare(70, vocabulary, 64, torch.bfloat16)


def test_rows_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane reduces several columns of a row, and the last step has fewer columns than lanes."""
    monkeypatch.setattr(kernel, "COLUMNS", 64)
    compare(37, 280, 20, torch.float32, bias=True, softcap=3.0)


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_a_single_output(which: int) -> None:
    compare(11, 129, 24, torch.float32, outputs=[which])


def test_strides_frozen_heads_and_no_tokens() -> None:
    hidden, weight, _ = make(9, 65, 16)
    wide = torch.randn(9, 32, device=DEVICE)
    wide[:, ::2] = hidden.detach().to(DEVICE)
    strided = wide[:, ::2].requires_grad_()
    frozen = weight.detach().to(DEVICE)
    targets = torch.arange(9, device=DEVICE)
    logprobs, _ = token_logprobs(strided, frozen, targets)
    close(
        logprobs.detach().cpu(),
        in_float64((hidden, weight, None), targets.cpu(), 1.0, None)[1].detach(),
        TOLERANCE[torch.float32][0],
    )
    logprobs.sum().backward()
    assert strided.grad is not None and frozen.grad is None
    nothing, entropy = token_logprobs(strided[:0], frozen.requires_grad_(), targets[:0])
    (nothing.sum() + entropy.sum()).backward()
    assert nothing.shape == (0,) and frozen.grad is not None and not frozen.grad.any()


def test_nan_and_targets_outside_show() -> None:
    hidden, weight, _ = (None if x is None else x.detach().to(DEVICE) for x in make(4, 40, 16))
    assert hidden is not None and weight is not None
    hidden[1, 3] = float("nan")
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([1, 2, 40, -1], device=DEVICE))
    assert logprobs.isnan().tolist() == [False, True, True, True]


def test_a_token_of_probability_zero_leaves_no_nan() -> None:
    hidden, weight, _ = on_device(make(4, 40, 16))
    bias = torch.zeros(40, device=DEVICE)
    bias[7] = float("-inf")
    logprobs, entropy = token_logprobs(hidden, weight, torch.arange(4, device=DEVICE), bias=bias)
    (logprobs.sum() + entropy.sum()).backward()
    for x in (logprobs, entropy, hidden.grad, weight.grad):
        assert isinstance(x, Tensor) and x.isfinite().all()


def test_one_shard_of_a_sharded_head() -> None:
    """Rows 100 to 310 of a head; the numbers of the other rows come from float64."""
    hidden, weight, _ = (None if x is None else x.detach().to(DEVICE) for x in make(37, 310, 40))
    assert hidden is not None and weight is not None
    targets, upstream = torch.randint(310, (37,), device=DEVICE), torch.randn(2, 37, device=DEVICE)
    exact, *outputs = in_float64((hidden, weight, None), targets, 0.7, 3.0)
    torch.autograd.backward(outputs, [upstream[0].double(), upstream[1].double()])
    z = 3 * torch.tanh(hidden.double() @ weight[:100].double().T / 3) / 0.7
    lse = z.logsumexp(-1)
    entropy = lse - (z.softmax(-1) * z).sum(-1)
    target_logits = torch.where(targets < 100, z.gather(1, targets.clamp(max=99)[:, None])[:, 0], 0)

    def reduce_sum(ours: Tensor) -> Tensor:
        if ours.ndim == 2 and ours.shape[0] == 3:
            w = (lse - highest[0]).exp()
            return ours + torch.stack([w, w * (entropy - lse + highest[0]), target_logits]).float()
        return ours

    def reduce_max(ours: Tensor) -> Tensor:
        highest.append(torch.maximum(ours, lse.float()))
        return highest[0]

    highest: list[Tensor] = []
    rows = weight[100:].clone().requires_grad_()
    shard = VocabularyShard(100, reduce_max, reduce_sum)
    found = token_logprobs(hidden, rows, targets, 0.7, None, 3.0, shard)
    torch.autograd.backward(found, [upstream[0], upstream[1]])
    for mine, theirs in zip(found, outputs, strict=True):
        close(mine.detach(), theirs.detach(), TOLERANCE[torch.float32][0])
    assert rows.grad is not None and exact[1].grad is not None
    close(rows.grad, exact[1].grad[100:], TOLERANCE[torch.float32][1])
