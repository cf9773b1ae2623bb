"""The advantage of each response token: shaped rewards and one of the estimators in `ESTIMATORS`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from step3_ppo.advantages import KL, distill, gae, grpo, is_uniform, online_dpo, rloo, shaped_rewards, whiten
from step3_ppo.rollout import Rollout


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


AdvantageEstimator = Callable[[Rollout, Tensor, Tensor], Advantages]
"""A rollout, its shaped rewards (B, R) and the scores (B,) in them -> advantages."""


@dataclass(frozen=True)
class RewardShaping:
    """The numbers that turn scores into rewards.

    score_clip: bound on the absolute score; None does not clip
    missing_end_penalty: subtracted from the score of an answer without an end token
    length_penalty: subtracted from the score for each token beyond `length_free`
    kl_estimator: "k1", "k2" or "k3", see `step3_ppo.advantages.KL`
    kl_in_reward: whether the KL to the reference counts in the reward; otherwise it is a term of the policy loss
    """

    score_clip: float | None = None
    missing_end_penalty: float = 1.0
    length_penalty: float = 0.0
    length_free: int = 0
    kl_estimator: str = "k1"
    kl_in_reward: bool = True


def compute_advantages(
    rollout: Rollout, shaping: RewardShaping, estimate: AdvantageEstimator, *, kl_coef: float
) -> Advantages:
    """Shape the rewards of a rollout and estimate the advantages. `kl_coef` weighs the KL to the reference."""
    scores = answer_scores(rollout.scores, rollout.finished, rollout.response_mask.sum(1), shaping)
    assert rollout.reference is not None or kl_coef == 0, "a KL without a reference"
    kl = torch.zeros_like(rollout.logprobs)
    if rollout.reference is not None:
        kl = KL[shaping.kl_estimator](rollout.logprobs, rollout.reference)
    kl_coef = kl_coef if shaping.kl_in_reward else 0.0
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
    rollout: Rollout, rewards: Tensor, scores: Tensor, *, gamma: float, lam: float, whiten_advantages: bool
) -> Advantages:
    """Estimate by GAE with a critic (Schulman et al., 2016, arXiv:1506.02438), whitened over the global batch."""
    assert rollout.values is not None
    mask = rollout.response_mask
    advantages, returns = gae(rewards, rollout.values, mask, gamma=gamma, lam=lam)
    return Advantages(whiten(advantages, mask) if whiten_advantages else advantages, rewards, returns)


def estimate_rloo(rollout: Rollout, rewards: Tensor, scores: Tensor, *, samples: int) -> Advantages:
    """Estimate by RLOO: the reward of an answer, less the mean reward of the other answers to its prompt."""
    advantages = _for_each_token(rloo(rewards.sum(1), samples), rollout)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_grpo(
    rollout: Rollout, rewards: Tensor, scores: Tensor, *, samples: int, divide_by_std: bool
) -> Advantages:
    """Estimate by GRPO: the reward of an answer relative to all answers to its prompt."""
    advantages = _for_each_token(grpo(rewards.sum(1), samples, divide_by_std=divide_by_std), rollout)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_reinforce(
    rollout: Rollout, rewards: Tensor, scores: Tensor, *, gamma: float, whiten_advantages: bool
) -> Advantages:
    """Estimate by REINFORCE++ (Hu, 2025, arXiv:2501.03262): the discounted reward from a token on, whitened."""
    mask = rollout.response_mask
    to_come, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return Advantages(whiten(to_come, mask) if whiten_advantages else to_come, rewards)


def estimate_reinforce_baseline(
    rollout: Rollout, rewards: Tensor, scores: Tensor, *, samples: int, whiten_advantages: bool
) -> Advantages:
    """Estimate by REINFORCE++ with group baseline (Hu, 2025, arXiv:2501.03262): less the group's mean, then whitened.

    The whitening divides by the spread over the global batch, where GRPO divides by that of each group.
    """
    advantages = _for_each_token(grpo(rewards.sum(1), samples, divide_by_std=False), rollout)
    if whiten_advantages:
        advantages = whiten(advantages, rollout.response_mask)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_online_dpo(
    rollout: Rollout, rewards: Tensor, scores: Tensor, *, samples: int, pair_beta: float
) -> Advantages:
    """Estimate by online DPO: the weights of the best and the worst answer to each prompt in the gradient of DPO."""
    assert rollout.reference is not None, "online DPO without a reference"
    log_ratios = torch.where(rollout.response_mask, rollout.logprobs - rollout.reference, 0).sum(1)
    advantages = _for_each_token(online_dpo(scores, log_ratios, samples, beta=pair_beta), rollout)
    return Advantages(advantages, rewards, uniform_prompts=is_uniform(scores, samples).float().mean())


def estimate_distill(rollout: Rollout, rewards: Tensor, scores: Tensor) -> Advantages:
    """Estimate by on-policy distillation: the log-ratio of teacher and student at each token. The reference teaches."""
    assert rollout.reference is not None, "distillation without a teacher"
    ratios = torch.where(rollout.response_mask, distill(rollout.logprobs, rollout.reference), 0)
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


def _for_each_token(advantages: Tensor, rollout: Rollout) -> Tensor:
    """(B,) -> (B, R), zero outside the response mask."""
    return torch.where(rollout.response_mask, advantages[:, None], torch.zeros_like(rollout.logprobs))
