"""From scores to advantages: KL estimators, shaped rewards, and the estimators of advantages in `ESTIMATORS`.

All tensors are (B, R) fp32 over response tokens. `mask` (B, R) bool is True for response tokens. Values and rewards
outside of the mask count as zero, and results are zero there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredRollout:
    """The numbers of a rollout that its advantages depend on.

    finished: (B,) bool, whether the response has an end token
    response_mask: (B, R) bool; the tables below are (B, R) fp32 and zero outside the mask. They have no place for
        messages
    scores: (B,) fp32, the score of the reward model less its mean over reference answers, plus that of the function;
        without either, the log-ratio of the reference (the teacher) and the policy, summed over the tokens
    logprobs: log-probabilities under the policy, by the trainer's forward
    reference: log-probabilities under the reference; None without a reference
    values: the critic's value before each token; None without a critic
    """

    finished: Tensor
    response_mask: Tensor
    scores: Tensor
    logprobs: Tensor
    reference: Tensor | None
    values: Tensor | None


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


def is_uniform(scores: Tensor, samples: int) -> Tensor:
    """Return (B / samples,) bool: whether all answers to a prompt have the same score, so that none is preferred.

    Scores with penalties are sums in fp32. Scores that differ by the rounding of such a sum are the same.
    """
    groups = scores.view(-1, samples)
    return torch.isclose(groups.amax(1), groups.amin(1), rtol=1e-6, atol=1e-6)


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


@dataclass(frozen=True)
class Advantages:
    """What a rollout is trained on; B sequences, R response tokens.

    advantages: (B, R) fp32, zero outside the response mask
    rewards: (B, R) fp32, the shaped rewards that the advantages come from
    returns: (B, R) fp32, what the critic learns to predict; None without a critic
    uniform_prompts: () fp32, the share of prompts whose answers all have the same score; None for estimators that do
        not compare the answers to one prompt
    """

    advantages: Tensor
    rewards: Tensor
    returns: Tensor | None = None
    uniform_prompts: Tensor | None = None


AdvantageEstimator = Callable[[ScoredRollout, Tensor, Tensor], Advantages]
"""A rollout, its shaped rewards (B, R) and the scores (B,) in them -> advantages."""


@dataclass(frozen=True)
class RewardShaping:
    """The numbers that turn scores into rewards.

    score_clip: bound on the absolute score; None does not clip
    missing_end_penalty: subtracted from the score of an answer without an end token
    length_penalty: subtracted from the score for each token beyond `length_free`
    kl_estimator: the estimator of the KL in the reward, a name in `KL`; None: the KL is a term of the policy loss
    """

    score_clip: float | None = None
    missing_end_penalty: float = 1.0
    length_penalty: float = 0.0
    length_free: int = 0
    kl_estimator: str | None = "k1"


def compute_advantages(
    rollout: ScoredRollout, shaping: RewardShaping, estimate: AdvantageEstimator, *, kl_coef: float
) -> Advantages:
    """Shape the rewards of a rollout and estimate the advantages. `kl_coef` weighs the KL to the reference."""
    scores = answer_scores(rollout.scores, rollout.finished, rollout.response_mask.sum(1), shaping)
    assert rollout.reference is not None or kl_coef == 0, "a KL without a reference"
    kl = torch.zeros_like(rollout.logprobs)
    if rollout.reference is not None and shaping.kl_estimator is not None:
        kl = KL[shaping.kl_estimator](rollout.logprobs, rollout.reference)
    rewards = shaped_rewards(scores, kl, rollout.response_mask, kl_coef=kl_coef)
    return estimate(rollout, rewards, scores)


def answer_scores(scores: Tensor, finished: Tensor, lengths: Tensor, shaping: RewardShaping) -> Tensor:
    """Return the clipped score of each answer, less the penalties for a missing end token and for length, (B,) fp32.

    scores: (B,) fp32, before clipping
    finished: (B,) bool, whether the answer has an end token
    lengths: (B,) the number of tokens of each answer
    """
    clip = shaping.score_clip
    scores = scores if clip is None else scores.clamp(-clip, clip)
    scores = scores - shaping.missing_end_penalty * (~finished)
    if not shaping.length_penalty:
        return scores
    excess = (lengths - shaping.length_free).clamp(min=0)
    return scores - shaping.length_penalty * excess


def estimate_gae(
    rollout: ScoredRollout, rewards: Tensor, scores: Tensor, *, gamma: float, lam: float, whiten_advantages: bool
) -> Advantages:
    """Estimate by GAE with a critic (Schulman et al., 2016, arXiv:1506.02438), whitened over the global batch."""
    assert rollout.values is not None
    mask = rollout.response_mask
    advantages, returns = gae(rewards, rollout.values, mask, gamma=gamma, lam=lam)
    return Advantages(whiten(advantages, mask) if whiten_advantages else advantages, rewards, returns)


def estimate_rloo(rollout: ScoredRollout, rewards: Tensor, scores: Tensor, *, samples: int) -> Advantages:
    """Estimate by RLOO: the reward of an answer, less the mean reward of the other answers to its prompt."""
    advantages = _for_each_token(rloo(rewards.sum(1), samples), rollout)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_grpo(
    rollout: ScoredRollout, rewards: Tensor, scores: Tensor, *, samples: int, divide_by_std: bool
) -> Advantages:
    """Estimate by GRPO: the reward of an answer relative to all answers to its prompt."""
    advantages = _for_each_token(grpo(rewards.sum(1), samples, divide_by_std=divide_by_std), rollout)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_reinforce(
    rollout: ScoredRollout, rewards: Tensor, scores: Tensor, *, gamma: float, whiten_advantages: bool
) -> Advantages:
    """Estimate by REINFORCE++ (Hu, 2025, arXiv:2501.03262): the discounted reward from a token on, whitened."""
    mask = rollout.response_mask
    to_come, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return Advantages(whiten(to_come, mask) if whiten_advantages else to_come, rewards)


def estimate_reinforce_baseline(
    rollout: ScoredRollout, rewards: Tensor, scores: Tensor, *, samples: int, whiten_advantages: bool
) -> Advantages:
    """Estimate by REINFORCE++ with group baseline (Hu, 2025, arXiv:2501.03262): less the group's mean, then whitened.

    The whitening divides by the spread over the global batch, where GRPO divides by that of each group.
    """
    advantages = _for_each_token(grpo(rewards.sum(1), samples, divide_by_std=False), rollout)
    if whiten_advantages:
        advantages = whiten(advantages, rollout.response_mask)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_online_dpo(
    rollout: ScoredRollout, rewards: Tensor, scores: Tensor, *, samples: int, pair_beta: float
) -> Advantages:
    """Estimate by online DPO: the weights of the best and the worst answer to each prompt in the gradient of DPO."""
    assert rollout.reference is not None, "online DPO without a reference"
    log_ratios = torch.where(rollout.response_mask, rollout.logprobs - rollout.reference, 0).sum(1)
    advantages = _for_each_token(online_dpo(scores, log_ratios, samples, beta=pair_beta), rollout)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_distill(rollout: ScoredRollout, rewards: Tensor, scores: Tensor) -> Advantages:
    """Estimate by on-policy distillation: log q(token) - log p(token) of student p and teacher q, the reference.

    As the advantage of a policy gradient step, its expectation is the negative gradient of KL(p, q) at each position of
    the student's own answers. The gradient through the choice of these positions is left out (Agarwal et al., 2023,
    "On-policy distillation of language models", arXiv:2306.13649, section 3.2, with the reverse KL; Lu and Thinking
    Machines Lab, 2025, "On-policy distillation").
    """
    assert rollout.reference is not None, "distillation without a teacher"
    ratios = torch.where(rollout.response_mask, rollout.reference - rollout.logprobs, 0)
    return Advantages(ratios, ratios)


ESTIMATORS: dict[str, tuple[Callable[..., Advantages], tuple[str, ...]]] = {
    "gae": (estimate_gae, ("gamma", "lam", "whiten_advantages")),
    "rloo": (estimate_rloo, ("samples",)),
    "grpo": (estimate_grpo, ("samples", "divide_by_std")),
    "reinforce": (estimate_reinforce, ("gamma", "whiten_advantages")),
    "reinforce_baseline": (estimate_reinforce_baseline, ("samples", "whiten_advantages")),
    "online_dpo": (estimate_online_dpo, ("samples", "pair_beta")),
    "distill": (estimate_distill, ()),
}
"""The estimators by the value of `ppo.advantage`, with the keys of `ppo` that they take."""


def _for_each_token(advantages: Tensor, rollout: ScoredRollout) -> Tensor:
    """(B,) -> (B, R), zero outside the response mask."""
    return torch.where(rollout.response_mask, advantages[:, None], torch.zeros_like(rollout.logprobs))
