"""From scores to advantages: KL-shaped rewards, whitening. What lies between, GAE, is `engine.kernels.gae`.

All tensors are (B, R) fp32 over response tokens, `mask` (B, R) bool is True where a token counts. Values and rewards
outside the mask are taken as zero, and results are zero there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log p - log q of tokens drawn from p: unbiased for KL(p, q), negative for some tokens (Schulman, 2020)."""
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, but its gradient is that of KL(p, q) on average (Schulman, 2020)."""
    return 0.5 * (logprobs - reference).square()


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased as well, never negative, of lower variance (Schulman, 2020)."""
    difference = (reference - logprobs).clamp(-20.0, 20.0)
    return difference.exp() - 1.0 - difference


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def shaped_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """-kl_coef * kl a token, plus the answer's score (B,) at its last token (Ziegler et al., 2019, equation 2)."""
    rewards = torch.where(mask, -kl_coef * kl, torch.zeros_like(kl))
    last = (mask.sum(1) - 1).clamp(min=0)
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    return torch.where(mask, rewards, torch.zeros_like(rewards))


def leave_one_out(earned: Tensor, samples: int) -> Tensor:
    """What each answer earned (B,) less the mean of what the others to its prompt did; `samples` neighbours have the
    same prompt (Kool et al., 2019; Ahmadian et al., 2024, arXiv:2402.14740, equation 8).
    """
    return above_mean(earned, samples) * (samples / (samples - 1))


def above_mean(earned: Tensor, samples: int) -> Tensor:
    """What each answer earned (B,) less the mean of all to its prompt (Liu et al., 2025, arXiv:2503.20783, section
    3.2). Exactly 0 where all earned the same: what rounding leaves of a mean would be blown up by their deviation.
    """
    groups = earned.view(-1, samples)
    above = groups - groups.mean(1, keepdim=True)
    return above.masked_fill(alike(earned, samples)[:, None], 0.0).flatten()


def alike(earned: Tensor, samples: int) -> Tensor:
    """(B / samples,) bool: prompts to which all answers earned the same, so that nothing is learned from them."""
    groups = earned.view(-1, samples)
    return groups.amax(1) == groups.amin(1)


def standardised(earned: Tensor, samples: int) -> Tensor:
    """What each answer earned (B,) less the mean of all to its prompt, over their standard deviation (Shao et al.,
    2024, arXiv:2402.03300, section 4.1.2); 0 where all earned the same.
    """
    deviations = earned.view(-1, samples).std(1).repeat_interleave(samples)
    return above_mean(earned, samples) / (deviations + 1e-6)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over the mask; 0 where it is empty."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum().clamp(min=1)


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """The population variance over the mask."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def whiten(x: Tensor, mask: Tensor, moments: Tensor | None = None) -> Tensor:
    """To mean 0 and variance 1 over the mask, which spans the whole batch of all ranks.

    `moments` (3,) are count, mean and squared deviations of x over the mask, where `gae` has found them on its way.
    """
    if moments is None:
        mean, variance = masked_mean(x, mask), masked_variance(x, mask)
    else:
        mean, variance = moments[1], moments[2] / moments[0].clamp(min=1)
    white = (x - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, white, torch.zeros_like(x))


@dataclass(frozen=True)
class KlController:
    """The weight of the KL penalty: fixed, or steered to `target` nats a sequence (Ziegler et al., 2019, sec. 2.2)."""

    coef: float
    target: float | None
    horizon: int

    def after(self, kl: float, sequences: int) -> "KlController":
        """The controller after a rollout of `sequences` with mean KL `kl`."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return KlController(self.coef * (1.0 + error * sequences / self.horizon), self.target, self.horizon)
