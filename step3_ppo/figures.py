"""The figures of one PPO step: means over response tokens or over sequences, padding never counted."""

import statistics
from collections.abc import Sequence

from torch import Tensor

from step3_ppo.advantages import kl_k3, masked_mean, masked_variance
from step3_ppo.rollout import Rollout
from step3_ppo.update import Targets


def rollout_figures(rollout: Rollout, targets: Targets) -> dict[str, float]:
    """What was drawn: scores, KL to the reference (nats a sequence), lengths, how far generator and trainer differ."""
    mask = rollout.response_mask
    gap = (rollout.generator.exp() - rollout.logprobs.exp()).abs()
    return {
        "score": rollout.scores.mean().item(),
        "score_std": rollout.scores.std(unbiased=False).item(),
        "kl": sequence_kl(rollout),
        "kl_k3": (kl_k3(rollout.logprobs, rollout.reference) * mask).sum(1).mean().item(),
        "response_length": mask.sum(1).float().mean().item(),
        "eos_rate": rollout.finished.float().mean().item(),
        "explained_variance": explained_variance(rollout.values, targets.returns, mask),
        "generator_gap": masked_mean(gap, mask).item(),
        "generator_kl": masked_mean(kl_k3(rollout.generator, rollout.logprobs), mask).item(),
    }


def sequence_kl(rollout: Rollout) -> float:
    """Mean over sequences of the summed log-probability difference to the reference, nats."""
    return ((rollout.logprobs - rollout.reference) * rollout.response_mask).sum(1).mean().item()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that knows the mean only."""
    spread = masked_variance(returns, mask).item()
    return 1.0 - masked_variance(returns - values, mask).item() / spread if spread > 0 else 0.0


def mean_figures(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure over the optimizer steps of a rollout."""
    return {name: statistics.fmean(step[name] for step in steps) for name in (steps[0] if steps else {})}
