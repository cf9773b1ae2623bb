"""On a GPU the public names run Triton's kernels, at the sizes of real models, and say what the torch paths say there.

(With a GPU the tests of the Triton sources beside this file run compiled, too.)
"""

import importlib

import pytest
import torch
from torch import Tensor

from engine import kernels
from engine.kernels.decode_attention import Prompts
from engine.kernels.decode_attention import reference as plain_attention
from tests.engine.kernels.oracle import PLAIN, no_prompts, probability_and_border
from tests.gpu import DEVICE, ON_GPU, needs_gpu

pytestmark = needs_gpu
plain_logprobs = importlib.import_module("engine.kernels.token_logprobs")
SCALE = 1 if ON_GPU else 16  # the CPU tries the code only


@pytest.mark.parametrize("name", ["decode_attention", "sample", "token_logprobs"])
def test_the_names_select_triton(name: str) -> None:
    module = importlib.import_module(f"engine.kernels.{name}")
    selected = module._implementation(torch.empty(1, 1, device=DEVICE))
    function = selected[0] if isinstance(selected, tuple) else selected
    assert ("kernels_triton" in function.__module__) == ON_GPU


@pytest.mark.parametrize("vocabulary", [50272, 151936])
@pytest.mark.parametrize("tokens", [16, 1000])
def test_token_logprobs(tokens: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    width, vocabulary = 1024 // SCALE, vocabulary // SCALE
    hidden = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=DEVICE) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    upstream = torch.randn(2, tokens, device=DEVICE)
    found: list[tuple[Tensor, ...]] = []
    for implementation in (None, plain_logprobs):
        if implementation is not None:
            monkeypatch.setattr(
                plain_logprobs,
                "_implementation",
                lambda _: (plain_logprobs.reduce_block, plain_logprobs.block_gradient),
            )
        hidden.grad = weight.grad = None
        logprobs, entropy = kernels.token_logprobs(hidden, weight, targets, 0.7)
        torch.autograd.backward([logprobs, entropy], [upstream[0], upstream[1]])
        assert hidden.grad is not None and weight.grad is not None
        found.append((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, theirs, tolerance in zip(*found, (1e-4, 1e-4, 1e-2, 1e-2), strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= tolerance


@pytest.mark.parametrize("extras", [{}, {"window": 1024}, {"softcap": 30.0}])
@pytest.mark.parametrize(("batch", "longest"), [(1, 16384), (64, 2048)])
def test_decode_attention(batch: int, longest: int, extras: dict) -> None:
    torch.manual_seed(0)
    longest, heads, key_heads, size = longest // SCALE, 32, 8, 128
    cache = torch.randn(2, batch + 1, key_heads, longest, size, device=DEVICE, dtype=torch.bfloat16)
    query = torch.randn(batch, heads, size, device=DEVICE, dtype=torch.bfloat16)
    lengths = torch.randint(1, longest + 1, (batch,), device=DEVICE)
    lengths[0] = longest
    slots = torch.randperm(batch + 1, device=DEVICE)[:batch]
    ours, theirs = (
        attend(query.to(dtype), keys, values, no_prompts(keys, values, batch), slots, lengths, size**-0.5, **extras)
        for attend, dtype in ((kernels.decode_attention, torch.bfloat16), (plain_attention, torch.float32))
        for keys, values in [cache.to(dtype).unbind()]
    )
    assert (ours.float() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("extras", [{}, {"window": 1024}])
def test_decode_attention_of_samples(extras: dict) -> None:
    """Eight prompts of eight samples each, which begin behind the last token or with it."""
    torch.manual_seed(0)
    longest, answer, heads, key_heads, size = 4096 // SCALE, 512 // SCALE, 32, 8, 128
    caches = [torch.randn(2, slots, key_heads, room, size, device=DEVICE, dtype=torch.bfloat16)
              for slots, room in ((9, longest), (65, answer))]  # fmt: skip
    query = torch.randn(64, heads, size, device=DEVICE, dtype=torch.bfloat16)
    of_eight = torch.arange(64, device=DEVICE) // 8
    shared = torch.randint(2, longest, (8,), device=DEVICE)[of_eight] - torch.randint(2, (64,), device=DEVICE)
    lengths, slots = shared + torch.randint(1, answer + 1, (64,), device=DEVICE), torch.randperm(64, device=DEVICE)
    ours, theirs = (
        attend(query.to(dtype), *caches[1].to(dtype), Prompts(*caches[0].to(dtype), of_eight, shared, 8 * of_eight),
               slots, lengths, size**-0.5, **extras)
        for attend, dtype in ((kernels.decode_attention, torch.bfloat16), (plain_attention, torch.float32))
    )  # fmt: skip
    assert (ours.float() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 200, "top_p": 0.95},
        {"temperature": 0.5, "top_p": 0.9},
        {"top_k": 5000, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_sample(settings: dict) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(256, 151936 // SCALE, device=DEVICE)
    uniforms = torch.rand(256, device=DEVICE)
    tokens, logprobs = kernels.sample(logits, uniforms, **settings)
    if settings.get("temperature") == 0:
        assert torch.equal(tokens, logits.argmax(-1))
        torch.testing.assert_close(logprobs.double(), logits.double().log_softmax(-1).amax(-1), atol=1e-4, rtol=0)
        return
    # There are tens of thousands of borders between tokens; the last bit of a sum may decide on which side u is. For
    # about one row in a hundred it decides whether the last token of its top-p remains, whose probability is 1.4e-5.
    probability, below = probability_and_border(tokens, logits, **{**PLAIN, **settings})
    numbers = uniforms.double()
    assert (probability > 0).all() and ((below - 2e-5 <= numbers) & (numbers <= below + probability + 2e-5)).all()
    torch.testing.assert_close(logprobs.double(), probability.log(), atol=1e-3, rtol=0)
