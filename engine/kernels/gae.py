"""Generalized advantage estimation over ragged rows, and what whitening over all ranks needs, in one pass.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  return_t = A_t + V_t

(Schulman et al., 2016, arXiv:1506.02438, equation 16); the value after a row's last token is zero, and what the mask
leaves out counts as zero and stops the sum.

The moments are count, mean and sum of squared deviations of the advantages over the mask: two such triples join without
loss of digits (`joined`; Chan, Golub & LeVeque, 1983), where sums of squares would cancel.

This is the torch implementation, for every device, and the reference for the faster one beside it.
"""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages and returns (B, R) fp32, zero outside the mask, and the moments (3,) fp32 of the advantages.

    rewards, values: (B, R); mask: (B, R) bool. No gradient. Raises ValueError where the shapes don't fit.
    """
    check(rewards, values, mask)
    with torch.no_grad():
        rewards = torch.where(mask, rewards.float(), 0)
        values = torch.where(mask, values.float(), 0)
        advantages = torch.zeros_like(rewards)
        following = next_value = rewards.new_zeros(rewards.shape[0])
        for t in range(rewards.shape[1] - 1, -1, -1):
            delta = rewards[:, t] + gamma * next_value - values[:, t]
            following = torch.where(mask[:, t], delta + gamma * lam * following, 0)
            advantages[:, t] = following
            next_value = values[:, t]
        count = mask.sum()
        mean = advantages.sum() / count.clamp(min=1)
        squares = torch.where(mask, advantages - mean, 0).square().sum()
        return advantages, advantages + values, torch.stack([count.float(), mean, squares])


def joined(moments: Tensor) -> Tensor:
    """Moments (n, 3) of n sets, of ranks for example -> (3,) of their union."""
    count, mean, squares = moments.double().unbind(-1)
    total = count.sum()
    middle = (count * mean).sum() / total.clamp(min=1)
    return torch.stack([total, middle, (squares + count * (mean - middle).square()).sum()]).float()


def check(rewards: Tensor, values: Tensor, mask: Tensor) -> None:
    """Raise ValueError where the shapes don't fit."""
    if rewards.ndim != 2 or rewards.shape != values.shape or rewards.shape != mask.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"rewards, values and mask must be (B, R), the mask bool: {tuple(rewards.shape)}, {tuple(values.shape)}, "
            f"{tuple(mask.shape)} of {mask.dtype}"
        )
