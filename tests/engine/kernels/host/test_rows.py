"""Norms, rotary embeddings and gates in C are PyTorch's operators in a row, with the same roundings."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.host import gates, library, norms, rotary

pytestmark = pytest.mark.skipif(library.library("norms") is None, reason="no C compiler, or switched off")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(library, "SHARE", 8)  # so that little work is shared, too
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", norms.Kind)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7), (1, 32, 384), (5, 2, 65)])
def test_norms_with_sums_before_them(dtype: torch.dtype, kind: norms.Kind, parts: int, shape: tuple[int, ...]) -> None:
    run, written = norms.norm_rows(shape, dtype, parts=parts, kind=kind, eps=1e-5)
    terms = [numbers(*shape, dtype=dtype, scale=3.0 + part) for part in range(parts)]
    weight, bias = numbers(shape[-1], dtype=dtype), numbers(1 + shape[-1], dtype=dtype)[1:]
    run(weight, bias if kind == norms.Kind.LAYER else None, *terms)
    total = sum(terms[1:], start=terms[0])
    if parts > 1:
        assert torch.equal(written[0], total)
    check_equal(written[-1], norms.normed(total, weight, bias, kind=kind, eps=1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, norms.Kind.RMS, norms.Kind.RMS_ONE])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "turned"), [(1, 1, 2, 2), (5, 3, 32, 32), (7, 2, 80, 80), (4, 4, 10, 6)]
)
def test_turned_heads_with_norms_before_them(
    dtype: torch.dtype, kind: norms.Kind | None, tokens: int, heads: int, size: int, turned: int
) -> None:
    joint = numbers(tokens, 3 * heads * size, dtype=dtype, scale=2.0)
    angles = numbers(tokens, turned, dtype=torch.float32, scale=5.0)
    cosines, sines, weight = angles.cos().to(dtype), angles.sin().to(dtype), numbers(size, dtype=dtype)
    at = (heads * size, 3 * heads * size, size)
    run, (written,) = rotary.turn_heads(tokens, heads, size, dtype, turned=turned, at=at, kind=kind, eps=1e-6)
    run(joint, cosines, sines, *([] if kind is None else [weight]))
    right = joint.view(tokens, 3, heads, size)[:, 1]
    if kind is not None:
        right = norms.normed(right, weight, None, kind=kind, eps=1e-6)
    right = rotary.turned_by_operators(right.transpose(0, 1), cosines, sines).transpose(0, 1)
    check_equal(written, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", gates.Kind)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 33), (3, 1100)])
def test_gates(dtype: torch.dtype, kind: gates.Kind, gated: bool, rows: int, size: int) -> None:
    joint = numbers(rows, 2 * size, dtype=dtype, scale=4.0)
    run, (written,) = gates.gate_rows(
        rows, size, dtype, kind=kind, gate=(0, 2 * size), up=(size, 2 * size) if gated else None
    )
    run(joint, *([joint] if gated else []))
    right = gates.activated(joint[:, :size], kind)
    check_equal(written, right * joint[:, size:] if gated else right)


@pytest.mark.parametrize("kind", gates.Kind)
def test_activations_of_large_numbers(kind: gates.Kind) -> None:
    x = torch.tensor([[-1e4, -90.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 90.0, 1e4]])
    run, (written,) = gates.gate_rows(1, 9, torch.float32, kind=kind, gate=(0, 9), up=None)
    run(x)
    torch.testing.assert_close(written, gates.activated(x, kind), rtol=1e-5, atol=1e-6)


KERNELS: dict[str, Callable[[], Any]] = {
    "norm": partial(norms.norm_rows, (2, 3), torch.bfloat16, parts=1, kind=norms.Kind.RMS, eps=1e-6),
    "gate": partial(gates.gate_rows, 2, 3, torch.bfloat16, kind=gates.Kind.SILU, gate=(0, 3), up=None),
}


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_no_number_stays_none(name: str) -> None:
    run, (written,) = KERNELS[name]()
    x = torch.full((2, 3), float("nan"), dtype=torch.bfloat16)
    run(torch.ones(3, dtype=torch.bfloat16), None, x) if name == "norm" else run(x)
    assert written.isnan().all()
