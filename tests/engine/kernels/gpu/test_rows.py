"""The Triton source of norms, turns of heads and gates against PyTorch's operators, with the same roundings."""

from functools import partial

import pytest
import torch

from engine.kernels.gpu import rows as kernel
from engine.kernels.host import gates, norms
from tests.engine.kernels.oracle import DEVICE
from tests.engine.kernels.rows import DTYPES, check_gate, check_large_numbers, check_norm, check_turn

NORM, TURN, GATE = (
    partial(make, device=torch.device(DEVICE)) for make in (kernel.norm_rows, kernel.turn_heads, kernel.gate_rows)
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", norms.Kind)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7), (1, 5, 384), (5, 2, 65)])
def test_norms_with_sums_before_them(dtype: torch.dtype, kind: norms.Kind, parts: int, shape: tuple[int, ...]) -> None:
    check_norm(NORM, dtype, kind, parts, shape, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, norms.Kind.RMS, norms.Kind.RMS_ONE])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "turned"), [(1, 1, 2, 2), (5, 3, 32, 32), (7, 2, 80, 80), (4, 4, 10, 6)]
)
def test_turned_heads_with_norms_before_them(
    dtype: torch.dtype, kind: norms.Kind | None, tokens: int, heads: int, size: int, turned: int
) -> None:
    check_turn(TURN, dtype, kind, tokens, heads, size, turned, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", gates.Kind)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 33), (3, 1100)])
def test_gates(dtype: torch.dtype, kind: gates.Kind, gated: bool, rows: int, size: int) -> None:
    check_gate(GATE, dtype, kind, gated, rows, size, DEVICE)


@pytest.mark.parametrize("kind", gates.Kind)
def test_activations_of_large_numbers(kind: gates.Kind) -> None:
    check_large_numbers(GATE, kind, DEVICE)
