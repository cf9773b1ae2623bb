"""What norms, turns of heads and gates should give, by PyTorch's operators: cases for kernels of any kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.kernels.host import gates, norms, rotary

DTYPES = [torch.float32, torch.bfloat16]
Maker = Callable[..., Any]


def numbers(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def check_equal(ours: Tensor, right: Tensor) -> None:
    """In bf16 all but a few numbers are the same: sums in another order may round otherwise."""
    assert ours.shape == right.shape and ours.dtype == right.dtype
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, right, rtol=2e-5, atol=2e-6)
    else:
        large = right.abs() > 1e-3  # below, an activation's 1 + tanh has lost most of its digits
        assert (ours != right)[large].float().mean() < 0.01
        torch.testing.assert_close(ours, right, rtol=2**-7, atol=1e-6)


def check_norm(
    make: Maker, dtype: torch.dtype, kind: norms.Kind, parts: int, shape: tuple[int, ...], device: str = "cpu"
) -> None:
    run, written = make(shape, dtype, parts=parts, kind=kind, eps=1e-5)
    terms = [numbers(*shape, dtype=dtype, scale=3.0 + part).to(device) for part in range(parts)]
    weight, bias = numbers(shape[-1], dtype=dtype), numbers(1 + shape[-1], dtype=dtype)[1:]
    weight, bias = weight.to(device), bias.to(device)
    run(weight, bias if kind == norms.Kind.LAYER else None, *terms)
    total = sum(terms[1:], start=terms[0])
    if parts > 1:
        assert torch.equal(written[0], total)
    check_equal(written[-1], norms.normed(total, weight, bias, kind=kind, eps=1e-5))


def check_turn(
    make: Maker, dtype: torch.dtype, kind: norms.Kind | None, tokens: int, heads: int, size: int, turned: int,
    device: str = "cpu",
) -> None:  # fmt: skip
    joint = numbers(tokens, 3 * heads * size, dtype=dtype, scale=2.0).to(device)
    angles = numbers(tokens, turned, dtype=torch.float32, scale=5.0)
    cosines, sines = (part.to(device, dtype) for part in (angles.cos(), angles.sin()))
    weight = numbers(size, dtype=dtype).to(device)
    at = (heads * size, 3 * heads * size, size)
    run, (written,) = make(tokens, heads, size, dtype, turned=turned, at=at, kind=kind, eps=1e-6)
    run(joint, cosines, sines, *([] if kind is None else [weight]))
    right = joint.view(tokens, 3, heads, size)[:, 1]
    if kind is not None:
        right = norms.normed(right, weight, None, kind=kind, eps=1e-6)
    right = rotary.turned_by_operators(right.transpose(0, 1), cosines, sines).transpose(0, 1)
    check_equal(written, right)


def check_gate(
    make: Maker, dtype: torch.dtype, kind: gates.Kind, gated: bool, rows: int, size: int, device: str = "cpu"
) -> None:
    joint = numbers(rows, 2 * size, dtype=dtype, scale=4.0).to(device)
    run, (written,) = make(rows, size, dtype, kind=kind, gate=(0, 2 * size), up=(size, 2 * size) if gated else None)
    run(joint, *([joint] if gated else []))
    right = gates.activated(joint[:, :size], kind)
    check_equal(written, right * joint[:, size:] if gated else right)


def check_large_numbers(make: Maker, kind: gates.Kind, device: str = "cpu") -> None:
    x = torch.tensor([[-1e4, -90.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 90.0, 1e4]], device=device)
    run, (written,) = make(1, 9, torch.float32, kind=kind, gate=(0, 9), up=None)
    run(x)
    torch.testing.assert_close(written, gates.activated(x, kind), rtol=1e-5, atol=1e-6)
