"""Detect reward over-optimization from the gold score and the reward score over PPO.

Over-optimization shows when the reward score keeps rising while the gold score falls (Gao, Schulman & Hilton, 2022,
arXiv:2210.10760).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.axes import MINUS
from pipeline.report.verdict import Outcome


@dataclass(frozen=True)
class Gaming:
    """Whether PPO over-optimized the reward score, with a short answer and the reason."""

    outcome: Outcome
    answer: str
    reason: str


def gaming(
    path: Sequence[tuple[float, float, float]], noise: float, rewarder: str = "reward model", *, helped: bool = False
) -> Gaming:
    """Decide whether PPO over-optimized the reward.

    path: (rollout, reward score, gold score) of each held-out evaluation
    noise: the range in which a gold mean moves by chance; a smaller fall below the best does not count
    rewarder: the name of the source of the reward score
    helped: whether the paired comparison per prompt shows a rise of gold from SFT to PPO
    """
    path = [point for point in path if all(math.isfinite(value) for value in point)]
    if len(path) < 3:
        reason = "Fewer than three evaluations have both scores. A lower ppo.eval_every gives more."
        return Gaming("open", "Unknown.", reason)
    (_, first_reward, first_gold), (last, last_reward, last_gold) = path[0], path[-1]
    best, reward_then, best_gold = max(path, key=lambda point: point[2])
    rewards = f"{_plain(reward_then)} to {_plain(last_reward)}"
    if best_gold - last_gold > noise and last_reward > reward_then:
        return Gaming(
            "bad",
            "Yes.",
            f"Gold was best at rollout {best:g} ({best_gold:.2f}) and fell to {last_gold:.2f} by rollout {last:g}, "
            f"while the reward score rose from {rewards}: the policy exploits errors of the {rewarder}. Stop earlier, "
            "or raise ppo.kl_coef.",
        )
    if last_reward <= first_reward:
        return Gaming("open", "No.", "The held-out reward score did not rise, so it was not gamed.")
    if helped or last_gold - first_gold > noise:
        return Gaming(
            "good",
            "No sign of it.",
            f"Reward and gold rose together, gold from {first_gold:.2f} to {last_gold:.2f}, and gold ended "
            "within noise of its best.",
        )
    return Gaming(
        "open",
        "Possibly.",
        f"The reward score rose from {_plain(first_reward)} to {_plain(last_reward)}, gold stayed near "
        f"{last_gold:.2f}: the {rewarder} may reward something that the gold scorer does not measure.",
    )


def _plain(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)
