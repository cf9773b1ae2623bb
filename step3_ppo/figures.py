"""The figures of one PPO step: means over response tokens or over sequences, padding never counted."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import Update
from engine.figures import numbers
from step3_ppo.advantages import kl_k1, kl_k3, masked_mean, masked_variance
from step3_ppo.rollout import Rollout
from step3_ppo.targets import Targets
from step3_ppo.update import means


@dataclass
class Learned:
    """What the optimizer steps of one rollout did."""

    steps: list[dict[str, float]] = field(default_factory=list)

    def add(self, tokens: int, policy: Update | None, critic: Update | None) -> None:
        """A minibatch of `tokens` response tokens: the actor's step, if it took one, and the critic's."""
        figures = {"lr": 0.0}
        if policy is not None:
            figures = means(policy, tokens) | policy.maxima
            figures |= {"policy_loss": policy.loss, "grad_norm": policy.grad_norm, "lr": policy.lr}
        if critic is not None:
            figures |= means(critic, tokens)
            figures |= {"value_loss": critic.loss, "critic_grad_norm": critic.grad_norm, "critic_lr": critic.lr}
        self.steps.append(figures)

    def figures(self) -> dict[str, float]:
        """Means over the steps; rates are the last step's, ratios the first one's."""
        first, last = self.steps[0], self.steps[-1]
        found = {k: v for k, v in mean_figures(self.steps).items() if k not in ("ratio", "largest", "deviation")}
        if "ratio" in first:
            found |= {"first_ratio": first["ratio"], "first_ratio_max_deviation": first["largest"]}
        return found | {name: last[name] for name in ("lr", "critic_lr") if name in last}


def rollout_figures(rollout: Rollout, targets: Targets) -> dict[str, float]:
    """What was drawn: scores, KL to the reference (nats a sequence), lengths, how far generator and trainer differ."""
    mask = rollout.response_mask
    gap = (rollout.generator.exp() - rollout.logprobs.exp()).abs()
    lengths = mask.sum(1).float()
    found = {
        "score": rollout.scores.mean(),
        "score_std": rollout.scores.std(unbiased=False),
        "score_min": rollout.scores.amin(),
        "score_max": rollout.scores.amax(),
        "reward": targets.rewards.sum(1).mean(),
        "response_length": lengths.mean(),
        "response_length_max": lengths.amax(),
        "eos_rate": rollout.finished.float().mean(),
        "generator_gap": masked_mean(gap, mask),
        "generator_kl": masked_mean(kl_k3(rollout.generator, rollout.logprobs), mask),
    }
    if rollout.reference is not None:
        found["kl"] = (kl_k1(rollout.logprobs, rollout.reference) * mask).sum(1).mean()
        found["kl_k3"] = (kl_k3(rollout.logprobs, rollout.reference) * mask).sum(1).mean()
    if rollout.function is not None:
        found["function_score"] = rollout.function.mean()
    if targets.alike is not None:
        found["alike_prompts"] = targets.alike
    if rollout.values is not None and targets.returns is not None:
        found["value"], found["return"] = masked_mean(rollout.values, mask), masked_mean(targets.returns, mask)
        found["explained_variance"] = explained_variance(rollout.values, targets.returns, mask)
    return dict(zip(found, numbers([*found.values()]), strict=True))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """(): 1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that knows the mean only."""
    spread = masked_variance(returns, mask)
    return torch.where(spread > 0, 1.0 - masked_variance(returns - values, mask) / spread, 0.0)


def mean_figures(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure over the optimizer steps of a rollout."""
    return {name: statistics.fmean(step[name] for step in steps) for name in (steps[0] if steps else {})}
