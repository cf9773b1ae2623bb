"""The Triton source of decode_attention against a loop in float64."""

from typing import Any

import pytest
import torch

from engine.kernels.decode_attention import reference as plain
from engine.kernels_triton import decode_attention as kernel
from engine.kernels_triton.device import dot_precision
from tests.engine.kernels.oracle import DEVICE, attention_in_float64, ragged_cache, with_prompts

# For values of about 1. bf16 rounds weights and results. A GPU's exponential has errors of 2^-22.
TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "extras"),
    [((3, 3), {}), ((6, 2), {"window": 70}), ((20, 1), {"softcap": 2.0, "window": 130}), ((6, 2), {"softcap": 2.0})],
)
def test_matches_float64(dtype: torch.dtype, heads: tuple[int, int], extras: dict) -> None:
    case = ragged_cache(*heads, width=20, of_values=24, lengths=[1, 70, 0, 301], capacity=310, dtype=dtype, **extras)
    ours = kernel.decode_attention(**case)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), attention_in_float64(**case), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, splits: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(kernel, "_splits", lambda *args: splits)
    case = ragged_cache(2, 1, width=16, lengths=[2, 33, 0, 199], capacity=256, dtype=dtype)
    ours = kernel.decode_attention(**case)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), attention_in_float64(**case), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(("width", "keys_a_step"), [(256, 64), (300, 32)])
def test_wide_heads_on_a_gpu_with_little_shared_memory(
    width: int, keys_a_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = 99 * 1024
    assert kernel.launch_options(width, width, 2, torch.bfloat16, small)["BT"] == keys_a_step
    monkeypatch.setattr(kernel, "shared_memory_and_multiprocessors", lambda device: (small, 4))
    case = ragged_cache(2, 1, width=width, lengths=[2, 0, 70], capacity=72, dtype=torch.bfloat16)
    ours = kernel.decode_attention(**case)
    torch.testing.assert_close(ours.double(), attention_in_float64(**case), atol=TOLERANCE[torch.bfloat16], rtol=0)


# 11 of 13 rows read one prompt: one row has ended, and one reads all but the last prompt token. Two rows read other
# prompts. The cases use tiles for 16, 8, 4 and 2 sequences.
FIRSTS = [0] * 11 + [11, 12]
KEPT = [150, 150, 149, 150, 150, 150, 150, 150, 150, 149, 150, 40, 0]
LENGTHS = [151, 290, 150, 220, 0, 163, 151, 200, 155, 150, 162, 111, 30]


@pytest.mark.parametrize(
    ("dtype", "heads", "extras"),
    [
        (torch.float32, (2, 2), {"window": 70}),
        (torch.bfloat16, (4, 2), {}),
        (torch.float32, (7, 1), {"window": 170, "softcap": 2.0}),
        (torch.bfloat16, (12, 1), {"softcap": 2.0}),
    ],
)
def test_shared_prompts(dtype: torch.dtype, heads: tuple[int, int], extras: dict) -> None:
    """Reads that are shared, separate, or by the torch implementation equal those of separate caches."""
    case = ragged_cache(*heads, width=20, of_values=24, lengths=LENGTHS, capacity=300, dtype=dtype, **extras)
    split = with_prompts(case, FIRSTS, KEPT, room=160)
    right = attention_in_float64(**split["alike"])
    assert not torch.isnan(right).any()
    for decode, reads in ((kernel.decode_attention, "joined"), (kernel.decode_attention, "apart"), (plain, "joined")):
        ours = decode(**split[reads])
        torch.testing.assert_close(ours.double(), right, atol=TOLERANCE[dtype], rtol=0)


def test_caches_may_be_views() -> None:
    case = ragged_cache(4, 2, width=16, lengths=[40, 9], capacity=48)
    plain = kernel.decode_attention(**case)
    for name in ("keys", "values"):  # stored as (S, T, Hkv, D)
        case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernel.decode_attention(**case), plain)


def test_products_follow_either_setting_of_pytorch() -> None:
    """After `fp32_precision` was set, PyTorch refuses to read the older setting."""
    setting: Any = torch.backends.cuda.matmul
    try:
        assert dot_precision(torch.float32) == "ieee"
        setting.fp32_precision = "tf32"
        assert [dot_precision(dtype) for dtype in (torch.float32, torch.bfloat16)] == ["tf32", "ieee"]
        setting.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("high")
        assert dot_precision(torch.float32) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_only_long_sequences_are_split() -> None:
    assert kernel._splits(8, 32768, 64, 132) == 32
    assert kernel._splits(8 * 256, 4096, 64, 132) == 1
    assert kernel._splits(1, 100, 64, 132) == 1


def test_no_sequences() -> None:
    case = ragged_cache(2, 1, width=16, lengths=[], capacity=8)
    assert kernel.decode_attention(**case).shape == (0, 2, 16)
    assert DEVICE in str(case["query"].device)
