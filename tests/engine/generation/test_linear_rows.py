"""Products of few rows in C against float64. A row's result does not depend on the other rows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.generation import prepacked_linears as linear
from engine.kernels_cpu import library as library_module
from engine.kernels_cpu.library import library

pytestmark = pytest.mark.skipif(not hasattr(library("linear"), "linear_rows"), reason="no C compiler, or no AVX2")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=[True, False], ids=["intel", "other"])
def _anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Test the kernel on every processor, also where the product would choose another implementation."""
    flags = [flag for flag in library_module.FLAGS if flag != "-DINTEL"] + ["-DINTEL"] * request.param
    monkeypatch.setattr(library_module, "FLAGS", flags)
    monkeypatch.setattr(linear, "library", library.__wrapped__)
    monkeypatch.setattr(linear, "has_in_place_kernel", lambda: True)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(ins: int, outs: int, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    return torch.randn(outs, ins).to(BF16), torch.randn(outs).to(BF16) if bias else None


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("rows", "ins", "outs"),
    [(1, 768, 80), (2, 77, 33), (3, 1000, 16), (6, 2500, 129), (13, 1025, 64), (37, 31, 100)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_float64(rows: int, ins: int, outs: int, threads: int, bias: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    weight, added = layer(ins, outs, bias=bias)
    x = torch.randn(rows, ins).to(BF16)
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    # Products of bf16 numbers are exact in fp32. Their fp32 sums are rounded once to bf16 (8 bits).
    slack = 2e-6 * (x.double().abs() @ weight.double().abs().T)
    actual = linear.LinearRows(weight, added)(x)
    assert actual.shape == (rows, outs) and actual.dtype == BF16
    assert bool(((actual.double() - expected).abs() <= 2**-8 * expected.abs() + slack).all())


def test_a_row_does_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    product, x = linear.LinearRows(*layer(1100, 289)), torch.randn(40, 1100).to(BF16)
    one_by_one = torch.cat([product(row[None]) for row in x])
    for rows in (2, 3, 4, 7, 8, 12, 15, 16, 17, 40):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(product(x[:rows]), one_by_one[:rows]), (rows, threads)


def test_leading_dimensions_strides_and_nan() -> None:
    torch.manual_seed(0)
    product, x = linear.LinearRows(*layer(64, 32)), torch.randn(2, 3, 128).to(BF16)
    rows = x[..., ::2].contiguous().view(6, 64)
    assert torch.equal(product(x[..., ::2]), product(rows).view(2, 3, 32))
    assert product(x[:0, :, :64]).shape == (0, 3, 32)
    broken = x[0, :, :64].clone()
    broken[1, 5] = float("nan")
    actual = product(broken)
    assert bool(actual[1].isnan().all()) and not bool(actual[[0, 2]].isnan().any())


def test_weights_are_not_copied() -> None:
    (weight, bias), x = layer(64, 32), torch.randn(4, 64).to(BF16)
    product = linear.LinearRows(weight, bias)
    before = product(x)
    weight.mul_(2)
    assert not torch.equal(product(x), before)
    with pytest.raises(ValueError, match="rows of 64"):
        product(x[:, :32])
    with pytest.raises(ValueError, match="float32"):
        product(x.float())
