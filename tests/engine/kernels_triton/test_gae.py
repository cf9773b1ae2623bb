"""The Triton source of gae against float64."""

import pytest
import torch

from engine.kernels_triton import gae as kernel
from tests.engine.kernels.oracle import DEVICE, gae_in_float64, ragged_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [16, 256])
def test_matches_float64(monkeypatch: pytest.MonkeyPatch, tile: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(kernel, "TILE", tile)
    rewards, values, mask = ragged_rows(dtype)
    ours = kernel.gae(rewards, values, mask, gamma=0.99, lam=0.95)
    for mine, exact in zip(ours, gae_in_float64(rewards, values, mask, 0.99, 0.95), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, atol=1e-5, rtol=1e-5)


def test_far_from_zero_the_moments_keep_their_digits() -> None:
    """Sums of squares of numbers near 1000 would leave no digit of a variance near 1."""
    torch.manual_seed(0)
    rewards = 1000 + torch.randn(7, 20, device=DEVICE)
    mask = torch.ones(7, 20, dtype=torch.bool, device=DEVICE)
    advantages, _, moments = kernel.gae(rewards, torch.zeros_like(rewards), mask, gamma=0.0, lam=0.0)
    variance = advantages.double().var(correction=0).item()
    assert moments[2].item() / 140 == pytest.approx(variance, rel=1e-3)


def test_nothing_to_do() -> None:
    for shape in ((0, 5), (3, 0), (2, 3)):
        empty = torch.zeros(shape, device=DEVICE)
        advantages, returns, moments = kernel.gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0)
        assert advantages.shape == returns.shape == shape and moments.tolist() == [0, 0, 0]
