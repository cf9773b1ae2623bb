"""Norms, rotary embeddings and gates in C are PyTorch's operators in a row, with the same roundings."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from engine.kernels.host import gates, library, norms, rotary
from tests.engine.kernels.rows import DTYPES, check_gate, check_large_numbers, check_norm, check_turn

pytestmark = pytest.mark.skipif(library.library("norms") is None, reason="no C compiler, or switched off")


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(library, "SHARE", 8)  # so that little work is shared, too
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", norms.Kind)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7), (1, 32, 384), (5, 2, 65)])
def test_norms_with_sums_before_them(dtype: torch.dtype, kind: norms.Kind, parts: int, shape: tuple[int, ...]) -> None:
    check_norm(norms.norm_rows, dtype, kind, parts, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, norms.Kind.RMS, norms.Kind.RMS_ONE])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "turned"), [(1, 1, 2, 2), (5, 3, 32, 32), (7, 2, 80, 80), (4, 4, 10, 6)]
)
def test_turned_heads_with_norms_before_them(
    dtype: torch.dtype, kind: norms.Kind | None, tokens: int, heads: int, size: int, turned: int
) -> None:
    check_turn(rotary.turn_heads, dtype, kind, tokens, heads, size, turned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", gates.Kind)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 33), (3, 1100)])
def test_gates(dtype: torch.dtype, kind: gates.Kind, gated: bool, rows: int, size: int) -> None:
    check_gate(gates.gate_rows, dtype, kind, gated, rows, size)


@pytest.mark.parametrize("kind", gates.Kind)
def test_activations_of_large_numbers(kind: gates.Kind) -> None:
    check_large_numbers(gates.gate_rows, kind)


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
