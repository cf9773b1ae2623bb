"""gae, the torch path, against sums by hand and in float64; moments that join."""

import pytest
import torch

from engine.kernels import gae
from engine.kernels.gae import joined
from tests.engine.kernels.oracle import gae_in_float64, ragged_rows


def test_two_rows_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 9.0], [0.0, 4.0, 8.0]])
    values = torch.tensor([[3.0, 5.0, float("nan")], [1.0, 1.0, 2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantages, returns, moments = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # Row 0: deltas 1 + 2.5 - 3, 2 - 5. Row 1: deltas 0.5 - 1, 4 + 1 - 1, 8 - 2; each adds a quarter of the next.
    assert advantages.tolist() == [[0.5 - 0.75, -3.0, 0.0], [-0.5 + 0.25 * 5.5, 5.5, 6.0]]
    assert returns.tolist() == [[2.75, 2.0, 0.0], [1.875, 6.5, 8.0]]
    counted = torch.tensor([-0.25, -3.0, 0.875, 5.5, 6.0])
    expected = [5, counted.mean().item(), (counted.var(correction=0) * 5).item()]
    torch.testing.assert_close(moments, torch.tensor(expected))


def test_matches_float64() -> None:
    rewards, values, mask = ragged_rows(torch.float32)
    ours = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    for mine, exact in zip(ours, gae_in_float64(rewards, values, mask, 0.99, 0.95), strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=1e-5, rtol=1e-5)


def test_moments_of_ranks_join() -> None:
    rewards, values, mask = ragged_rows(torch.float32)
    whole = gae(rewards, values, mask, gamma=1.0, lam=0.9)[2]
    parts = [gae(*(x[i::2] for x in (rewards, values, mask)), gamma=1.0, lam=0.9)[2] for i in range(2)]
    torch.testing.assert_close(joined(torch.stack([*parts, torch.zeros(3)])), whole)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="must be \\(B, R\\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool), gamma=1.0, lam=1.0)
