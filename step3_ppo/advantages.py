"""Formulas from scores to advantages: KL estimators, shaped rewards, GAE, RLOO, GRPO, whitening.

All tensors are (B, R) fp32 over response tokens. `mask` (B, R) bool is True for response tokens. Values and rewards
outside of the mask count as zero, and results are zero there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return log p - log q of tokens sampled from p: unbiased for KL(p, q), may be negative (Schulman, 2020)."""
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return (log p - log q)^2 / 2: biased, but its mean gradient is that of KL(p, q) (Schulman, 2020)."""
    return 0.5 * (logprobs - reference).square()


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return q/p - 1 - log(q/p): unbiased, never negative, with a lower variance than k1 (Schulman, 2020)."""
    difference = (reference - logprobs).clamp(-20.0, 20.0)
    return difference.exp() - 1.0 - difference


def kl_k3_weighted(logprobs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    """Return k3 times p / p_old, for tokens sampled from p_old.

    The value and its gradient are unbiased for KL(p, q), also after the first update of a rollout (DeepSeek-AI, 2025,
    "DeepSeek-V3.2", section 3.1). The log-ratio is clamped to +-20.
    """
    return (logprobs - old).clamp(-20.0, 20.0).exp() * kl_k3(logprobs, reference)


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""The estimators of the KL by their names, from (logprobs, reference)."""


def loss_kl(name: str, logprobs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    """Return the KL of each token as a term of the policy's loss, by the estimator `name`."""
    return kl_k3_weighted(logprobs, reference, old) if name == "k3_weighted" else KL[name](logprobs, reference)


def shaped_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return -kl_coef * kl per token, plus the score (B,) at the last token (Ziegler et al., 2019, equation 2)."""
    rewards = torch.where(mask, -kl_coef * kl, torch.zeros_like(kl))
    last = (mask.sum(1) - 1).clamp(min=0)
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    return torch.where(mask, rewards, torch.zeros_like(rewards))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, (B, R) fp32 each, by generalized advantage estimation.

        delta_t = r_t + gamma V_{t+1} - V_t    A_t = delta_t + gamma lam A_{t+1}    return_t = A_t + V_t

    The value after the last token of a row is 0 (Schulman et al., 2016, arXiv:1506.02438, equation 16). No gradient.
    """
    with torch.no_grad():
        rewards, values = (torch.where(mask, x.float(), 0) for x in (rewards, values))
        next_values = torch.nn.functional.pad(values, (0, 1))[:, 1:]
        deltas = rewards + gamma * next_values - values
        advantages = torch.zeros_like(rewards)
        following = rewards.new_zeros(rewards.shape[0])
        for t in range(rewards.shape[1] - 1, -1, -1):
            following = torch.where(mask[:, t], deltas[:, t] + gamma * lam * following, 0)
            advantages[:, t] = following
        return advantages, advantages + values


def rloo(rewards: Tensor, samples: int) -> Tensor:
    """Return the reward of each answer (B,) less the mean reward of the other answers to its prompt.

    `samples` neighbours answer the same prompt (Kool et al., 2019; Ahmadian et al., 2024, arXiv:2402.14740, eq. 8).
    """
    return grpo(rewards, samples, divide_by_std=False) * (samples / (samples - 1))


def grpo(rewards: Tensor, samples: int, *, divide_by_std: bool) -> Tensor:
    """Return the reward of each answer (B,) less the mean reward of all answers to its prompt.

    `divide_by_std` divides by the standard deviation over these answers (Shao et al., 2024, arXiv:2402.03300, section
    4.1.2); without it this is Dr. GRPO (Liu et al., 2025, arXiv:2503.20783, section 3.2). The result is exactly 0 for
    equal rewards: otherwise the division would magnify the rounding error of the mean.
    """
    groups = rewards.view(-1, samples)
    above = groups - groups.mean(1, keepdim=True)
    above = above.masked_fill(is_uniform(rewards, samples)[:, None], 0.0).flatten()
    if not divide_by_std:
        return above
    return above / (groups.std(1).repeat_interleave(samples) + 1e-6)


def online_dpo(scores: Tensor, log_ratios: Tensor, samples: int, *, beta: float) -> Tensor:
    """Return the advantage of each answer (B,) with which a policy gradient step is a step of DPO on sampled pairs.

    scores: (B,); the answers with the highest and the lowest score of each prompt form its pair
    log_ratios: (B,) log pi(answer) - log pi_ref(answer), summed over the tokens

    The loss of a pair is -log sigmoid(beta (r_best - r_worst)), where r is the log-ratio (Guo et al., 2024,
    arXiv:2402.04792, section 3; Rafailov et al., 2023, equation 7). Its gradient is -w (grad log pi(best) - grad log
    pi(worst)) with w = beta sigmoid(beta (r_worst - r_best)). The advantage is therefore w for the best answer, -w for
    the worst, and 0 for the others and for prompts whose answers all have the same score.
    """
    groups, ratios = scores.view(-1, samples), log_ratios.view(-1, samples)
    best, worst = groups.argmax(1, keepdim=True), groups.argmin(1, keepdim=True)
    weights = beta * torch.sigmoid(beta * (ratios.gather(1, worst) - ratios.gather(1, best)))
    weights = weights.masked_fill(is_uniform(scores, samples)[:, None], 0.0)
    return torch.zeros_like(groups).scatter_add(1, best, weights).scatter_add(1, worst, -weights).flatten()


def distill(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """Return log q(token) - log p(token) of tokens that the student p sampled; q is the teacher.

    As the advantage of a policy gradient step, its expectation is the negative gradient of KL(p, q) at each position of
    the student's own answers. The gradient through the choice of these positions is left out (Agarwal et al., 2023,
    "On-policy distillation of language models", arXiv:2306.13649, section 3.2, with the reverse KL; Lu and Thinking
    Machines Lab, 2025, "On-policy distillation").
    """
    return -kl_k1(logprobs, teacher)


def is_uniform(scores: Tensor, samples: int) -> Tensor:
    """Return (B / samples,) bool: whether all answers to a prompt have the same score, so that none is preferred."""
    groups = scores.view(-1, samples)
    return groups.amax(1) == groups.amin(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask; 0 for an empty mask."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum().clamp(min=1)


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Return the population variance over the mask."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the mask, which spans the global batch."""
    white = (x - masked_mean(x, mask)) * torch.rsqrt(masked_variance(x, mask) + 1e-8)
    return torch.where(mask, white, torch.zeros_like(x))


@dataclass(frozen=True)
class KlController:
    """The KL weight: fixed, or adapted to `target` nats per sequence (Ziegler et al., 2019, section 2.2)."""

    coef: float
    target: float | None
    horizon: int

    def after(self, kl: float, sequences: int) -> "KlController":
        """Return the controller after a rollout of `sequences` with mean KL `kl`."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return KlController(self.coef * (1.0 + error * sequences / self.horizon), self.target, self.horizon)
