"""Products with fp32 sums in C against float64, for any strides. A row's result does not depend on other rows.

Without AVX-512, products.c is compiled with an emulation of its instructions, for these tests only.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import products as kernels_products
from engine.kernels.products import products_of
from engine.kernels_cpu import library, products
from engine.kernels_cpu.products import product, supports

BF16 = torch.bfloat16
HAS_AVX512 = supports(torch.float32)
IS_X86_LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
HAS_COMPILER = IS_X86_LINUX and shutil.which(os.environ.get("CC") or "cc") is not None
pytestmark = pytest.mark.skipif(not (HAS_AVX512 or HAS_COMPILER), reason="no C compiler, or another processor")
in_bf16 = pytest.mark.skipif(HAS_AVX512 and not supports(BF16), reason="a processor that does not multiply bf16")
SHAPES = [(5, 8, 3), (97, 130, 65), (13, 770, 70)]  # more rows, numbers and columns than one block, and fewer
THREADS = [1, 5]
if HAS_AVX512:  # the emulation is slow
    THREADS += [2]
    SHAPES += [(1, 2, 1), (6, 16, 64), (130, 770, 70), (20, 1600, 129), (205, 30, 200)]


@pytest.fixture(scope="module", autouse=True)
def _emulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this module's tests a library of their own, which neither the process nor the user's cache keeps."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_AVX512:
            header = Path(__file__).parent / "emulated"
            instructions = ("-D__AVX512F__", "-D__AVX512BF16__", f"-I{header}", "-Wno-psabi")
            flags = (*library.FLAGS, *instructions, "-Og")  # with -O3 the compiler takes seconds
            emulated = library._opened(library.HERE / "products.c", flags, tmp_path_factory.mktemp("emulated"))
            patch.setattr(products, "library", {"products": emulated}.get)
            patch.setattr(products, "supports", supports.__wrapped__)  # without its cache
        yield


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def turned(matrix: Tensor) -> Tensor:
    """Return the same matrix stored by columns."""
    return matrix.T.contiguous().T


def padded(matrix: Tensor) -> Tensor:
    """Return the same matrix with a leading dimension larger than its width."""
    wide = torch.full((len(matrix), matrix.shape[1] + 6), 7.0, dtype=matrix.dtype)
    wide[:, : matrix.shape[1]] = matrix
    return wide[:, : matrix.shape[1]]


def spread(matrix: Tensor) -> Tensor:
    """Return the same matrix without any contiguous elements."""
    return matrix.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]


def close(actual: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """Compare with float64 within the rounding of fp32 sums of that many terms."""
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    slack = 1e-6 * (a.double().abs() @ b.double().abs() + (0 if bias is None else bias.double().abs()))
    assert actual.dtype == torch.float32
    assert bool(((actual.double() - exact).abs() <= slack).all())


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(BF16, marks=in_bf16)])
def test_products_equal_float64(shape: tuple[int, int, int], dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    m, k, n = shape
    a, b, bias = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(n)
    for left in (a, turned(a), padded(a), spread(a)):
        for right in (b, turned(b), padded(b), spread(b)):
            close(product(left, right), a, b, None)
            close(product(left, right, bias), a, b, bias)


def test_a_row_does_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(230, 500), torch.randn(500, 90)
    single = torch.cat([product(row[None], b) for row in a])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(product(a, b), single)
        assert torch.equal(product(a[17:], b[:, :70]), single[17:, :70])
        assert torch.equal(product(turned(a), turned(b)), single)


def test_output_is_written_only_inside_its_bounds() -> None:
    a, b = torch.randn(13, 20), torch.randn(20, 70)
    around = torch.full((15, 80), 3.0)
    room = around[1:14, 5:75]
    assert product(a, b, out=room) is room
    close(room, a, b, None)
    room.fill_(3.0)
    assert bool((around == 3.0).all())


def test_empty_products() -> None:
    assert product(torch.ones(0, 4), torch.ones(4, 3)).shape == (0, 3)
    assert torch.equal(product(torch.ones(2, 0), torch.ones(0, 3), torch.arange(3.0)), torch.arange(3.0).expand(2, 3))
    assert not product(torch.ones(2, 0), torch.ones(0, 3)).any()


@in_bf16
def test_products_of_the_head_use_the_kernel_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    inner = product
    monkeypatch.setattr(kernels_products, "is_intel", lambda: False)
    monkeypatch.setattr(products, "product", lambda a, b, out=None: calls.append(a.dtype) or inner(a, b, out=out))
    hidden, weight = torch.randn(9, 64).to(BF16), torch.randn(33, 64).to(BF16)
    for width in (64, 63):  # the kernel reads pairs of numbers, so PyTorch computes odd widths
        _, dtype, multiply = products_of(hidden[:, :width], weight[:, :width])
        a, b = hidden[:, :width], weight[:, :width].T
        close(multiply(a.to(dtype), b.to(dtype)), a, b, None)
    assert calls == [BF16]
