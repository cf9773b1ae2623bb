"""Products of few rows in C: the sums of float64, the same for a row whatever is computed with it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.kernels_cpu import linear
from engine.kernels_cpu.library import library

pytestmark = pytest.mark.skipif(library("linear", exact=True) is None, reason="no C compiler")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On processors that are left to PyTorch the sums must be right, too."""
    if linear.way() == linear.Way.LEAVE:
        monkeypatch.setattr(linear, "way", lambda: linear.Way.WIDEN)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrices(ins: int, outs: list[int]) -> tuple[list[Tensor], list[Tensor | None]]:
    weights = [torch.randn(n, ins).to(BF16) for n in outs]
    return weights, [torch.randn(n).to(BF16) if at != 1 else None for at, n in enumerate(outs)]


def in_float64(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    parts = [
        x.double() @ weight.double().T + (0 if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(parts, -1)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("rows", "ins", "outs"),
    [(1, 768, [80]), (2, 77, [33]), (3, 1000, [16, 50]), (6, 2500, [129]), (13, 1025, [17, 64, 31]), (37, 31, [100])],
)
def test_products_are_those_of_float64(rows: int, ins: int, outs: list[int], threads: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    (weights, biases), x = matrices(ins, outs), torch.randn(rows, ins).to(BF16)
    right = in_float64(x, weights, biases)
    made = linear.LinearRows(weights, biases)
    # fp32 sums of products that are exact in fp32, rounded once to bf16 (8 bits)
    slack = 2e-6 * (x.double().abs() @ torch.cat(weights).double().abs().T)
    for relu in (False, True):
        found = made(x, relu=relu)
        expected = right.relu() if relu else right
        assert found.shape == (rows, sum(outs)) and found.dtype == BF16
        assert bool(((found.double() - expected).abs() <= 2**-8 * expected.abs() + slack).all())


def test_a_row_is_the_same_whatever_is_computed_with_it() -> None:
    torch.manual_seed(0)
    (weights, biases), x = matrices(1100, [49, 40, 200]), torch.randn(40, 1100).to(BF16)
    made = linear.LinearRows(weights, biases)
    alone = torch.cat([made(row[None]) for row in x])
    for rows in (2, 3, 4, 7, 8, 12, 15, 16, 17, 40):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(made(x[:rows]), alone[:rows]), (rows, threads)
    one_by_one = [linear.LinearRows([w], [b])(x) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(torch.cat(one_by_one, -1), alone)


def test_leading_dimensions_strides_and_numbers_that_are_none() -> None:
    torch.manual_seed(0)
    (weights, biases), x = matrices(64, [32]), torch.randn(2, 3, 128).to(BF16)
    made = linear.LinearRows(weights, biases)
    rows = x[..., ::2].contiguous().view(6, 64)
    assert torch.equal(made(x[..., ::2]), made(rows).view(2, 3, 32))
    assert made(x[:0, :, :64]).shape == (0, 3, 32)
    broken = x[0, :, :64].clone()
    broken[1, 5] = float("nan")
    found = made(broken, relu=True)
    assert bool(found[1].isnan().all()) and not bool(found[[0, 2]].isnan().any())


def test_weights_are_read_where_they_lie() -> None:
    (weights, biases), x = matrices(64, [32]), torch.randn(4, 64).to(BF16)
    made = linear.LinearRows(weights, biases)
    before = made(x)
    weights[0].mul_(2)
    assert not torch.equal(made(x), before)
    with pytest.raises(ValueError, match="rows of 64"):
        made(x[:, :32])
    with pytest.raises(ValueError, match="float32"):
        made(x.float())
