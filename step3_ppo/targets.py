"""What a rollout is trained on: from scores and the KL to the reference to an advantage for each token."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels import gae
from pipeline.config.schema import PpoSection
from step3_ppo.advantages import KL, above_mean, alike, leave_one_out, shaped_rewards, standardised, whiten
from step3_ppo.rollout import Rollout


@dataclass(frozen=True)
class Targets:
    """advantages, and the shaped rewards behind them: (B, R) fp32. returns likewise, what the critic is to foresee;
    None without a critic. kl_coef: the weight of the KL to the reference in the policy's loss, where it is part of it.
    alike (): share of prompts whose answers all scored the same; None where answers are not held against those to their
    prompt.
    """

    advantages: Tensor
    rewards: Tensor
    returns: Tensor | None = None
    kl_coef: float = 0.0
    alike: Tensor | None = None


def targets_of(rollout: Rollout, ppo: PpoSection, *, kl_coef: float) -> Targets:
    """In the way that `ppo.advantage` names, the KL to the reference where `ppo.kl_in` has it."""
    in_loss = ppo.kl_counts_in == "loss"
    earned = answer_scores(rollout, ppo)
    assert rollout.reference is not None or kl_coef == 0, "a KL without a reference"
    kl = torch.zeros_like(rollout.logprobs)
    if rollout.reference is not None:
        kl = KL[ppo.kl_estimator or "k1"](rollout.logprobs, rollout.reference)
    rewards = shaped_rewards(earned, kl, rollout.response_mask, kl_coef=0.0 if in_loss else kl_coef)
    found = WAYS[ppo.advantage](rollout, rewards, ppo)
    if ppo.advantage in ("rloo", "grpo"):
        found = replace(found, alike=alike(earned, ppo.samples).float().mean())
    return replace(found, kl_coef=kl_coef) if in_loss else found


def by_critic(rollout: Rollout, rewards: Tensor, ppo: PpoSection) -> Targets:
    """PPO: GAE, whitening over the global batch."""
    assert rollout.values is not None
    mask = rollout.response_mask
    advantages, returns, moments = gae(rewards, rollout.values, mask, gamma=ppo.gamma, lam=ppo.lam)
    return Targets(whiten(advantages, mask, moments) if ppo.whiten_advantages else advantages, rewards, returns)


def by_others(rollout: Rollout, rewards: Tensor, ppo: PpoSection) -> Targets:
    """RLOO: what a whole answer earned, less what the others to its prompt did."""
    return Targets(_for_each_token(leave_one_out(rewards.sum(1), ppo.samples), rollout), rewards)


def by_group(rollout: Rollout, rewards: Tensor, ppo: PpoSection) -> Targets:
    """GRPO: what a whole answer earned among those to its prompt."""
    among = standardised if ppo.divide_by_std else above_mean
    return Targets(_for_each_token(among(rewards.sum(1), ppo.samples), rollout), rewards)


def by_rollout(rollout: Rollout, rewards: Tensor, ppo: PpoSection) -> Targets:
    """REINFORCE++ (Hu, 2025, arXiv:2501.03262): what a token and those after it earned, whitened over all answers."""
    mask = rollout.response_mask
    earned, _, moments = gae(rewards, torch.zeros_like(rewards), mask, gamma=ppo.gamma, lam=1.0)
    return Targets(whiten(earned, mask, moments) if ppo.whiten_advantages else earned, rewards)


WAYS: dict[str, Callable[[Rollout, Tensor, PpoSection], Targets]] = {
    "gae": by_critic,
    "rloo": by_others,
    "grpo": by_group,
    "reinforce": by_rollout,
}


def answer_scores(rollout: Rollout, ppo: PpoSection) -> Tensor:
    """(B,) what an answer earns: the clipped score, less the penalties where it has no end token or many tokens."""
    clip = ppo.score_clip
    scores = rollout.scores if clip is None else rollout.scores.clamp(-clip, clip)
    scores = scores - ppo.missing_end_penalty * (~rollout.finished)
    if not ppo.length_penalty:
        return scores
    return scores - ppo.length_penalty * (rollout.response_mask.sum(1) - ppo.length_free).clamp(min=0)


def _for_each_token(advantages: Tensor, rollout: Rollout) -> Tensor:
    """(B,) -> (B, R), zero outside the answers."""
    return torch.where(rollout.response_mask, advantages[:, None], torch.zeros_like(rollout.logprobs))
