"""The Triton source of decode_attention against a loop in float64."""

import pytest
import torch

from engine.kernels import decode_attention_triton as kernel
from tests.engine.kernels.oracle import DEVICE, attention_in_float64, ragged_cache

# Of values of about 1; bf16 rounds weights and results, and a GPU's exponential is good to 2^-22.
TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (20, 1)])
@pytest.mark.parametrize("extras", [{}, {"window": 70}, {"alibi": True, "window": 130}, {"softcap": 2.0}])
def test_matches_float64(dtype: torch.dtype, heads: tuple[int, int], extras: dict) -> None:
    case = ragged_cache(*heads, width=20, of_values=24, lengths=[1, 70, 0, 301], capacity=310, dtype=dtype, **extras)
    ours = kernel.decode_attention(**case)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), attention_in_float64(**case), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits_do_not_matter(monkeypatch: pytest.MonkeyPatch, splits: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(kernel, "_splits", lambda *args: splits)
    case = ragged_cache(2, 1, width=16, lengths=[2, 33, 0, 199], capacity=256, dtype=dtype)
    ours = kernel.decode_attention(**case)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), attention_in_float64(**case), atol=TOLERANCE[dtype], rtol=0)


def test_caches_may_be_views() -> None:
    case = ragged_cache(4, 2, width=16, lengths=[40, 9], capacity=48)
    plain = kernel.decode_attention(**case)
    for name in ("keys", "values"):  # as (S, T, Hkv, D) in memory
        case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernel.decode_attention(**case), plain)


def test_one_long_sequence_fills_the_card_and_short_ones_stay_whole() -> None:
    assert kernel._splits(8, 32768, 64, 132) == 64
    assert kernel._splits(8 * 256, 4096, 64, 132) == 1
    assert kernel._splits(1, 100, 64, 132) == 1


def test_no_sequences() -> None:
    case = ragged_cache(2, 1, width=16, lengths=[], capacity=8)
    assert kernel.decode_attention(**case).shape == (0, 2, 16)
    assert DEVICE in str(case["query"].device)
