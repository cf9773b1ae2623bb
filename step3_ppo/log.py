"""What PPO logs: metrics of a rollout and of its updates, and rollouts.jsonl with some answers of each rollout.

Metrics are means over response tokens or over sequences; padding never counts. From the answers in rollouts.jsonl and
their scores the metrics can be computed again.
"""

import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import Update, distributed
from pipeline.evaluation.intervals import rank_correlation
from pipeline.files import explained_disk
from step3_ppo.advantages import Advantages, kl_k1, kl_k3, masked_mean, masked_variance
from step3_ppo.rollout import Rollout
from step3_ppo.update import means

ROLLOUTS = "rollouts.jsonl"
RETURN_ROUNDING = 1e-5  # relative rounding error of a return, a sum of hundreds of fp32 numbers
GENERATOR_GAP = 0.01  # mean difference of probabilities above which generator and trainer are different models


@dataclass
class UpdateMetrics:
    """The metrics of the optimizer steps of one rollout."""

    steps: list[dict[str, float]] = field(default_factory=list)

    def add(self, tokens: int, policy: Update | None, critic: Update | None) -> None:
        """Add the steps of actor and critic on a minibatch of `tokens` response tokens; None for no step."""
        figures = {"lr": 0.0}
        if policy is not None:
            figures = means(policy, tokens) | policy.maxima
            figures |= {"policy_loss": policy.loss, "grad_norm": policy.grad_norm, "lr": policy.lr}
        if critic is not None:
            figures |= means(critic, tokens)
            figures |= {"value_loss": critic.loss, "critic_grad_norm": critic.grad_norm, "critic_lr": critic.lr}
        self.steps.append(figures)

    def summary(self) -> dict[str, float]:
        """Return means over the steps; rates are those of the last step, ratios those of the first.

        Without steps (no answer of the rollout is finished, and `ppo.unfinished` is "mask") there are no metrics.
        """
        if not self.steps:
            return {}
        first, last = self.steps[0], self.steps[-1]
        names = [name for name in first if name not in ("ratio", "largest", "deviation")]
        found = {name: statistics.fmean(step[name] for step in self.steps) for name in names}
        if "ratio" in first:
            found |= {"first_ratio": first["ratio"], "first_ratio_max_deviation": first["largest"]}
        return found | {name: last[name] for name in ("lr", "critic_lr") if name in last}


def rollout_metrics(rollout: Rollout, advantages: Advantages) -> dict[str, float]:
    """Return scores, KL to the reference (nats per sequence), lengths and the gap between generator and trainer."""
    mask = rollout.response_mask
    gap = (rollout.generator.exp() - rollout.logprobs.exp()).abs()
    lengths = mask.sum(1).float()
    found = {
        "score": rollout.scores.mean(),
        "score_std": rollout.scores.std(unbiased=False),
        "score_min": rollout.scores.amin(),
        "score_max": rollout.scores.amax(),
        "reward": advantages.rewards.sum(1).mean(),
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
    if advantages.uniform_prompts is not None:
        found["alike_prompts"] = advantages.uniform_prompts
    if rollout.values is not None and advantages.returns is not None:
        found["value"], found["return"] = masked_mean(rollout.values, mask), masked_mean(advantages.returns, mask)
        found["explained_variance"] = explained_variance(rollout.values, advantages.returns, advantages.rewards, mask)
    means = torch.stack([value.double() for value in found.values()])
    values = torch.cat([means, rollout.scores.double()]).tolist()  # waits for the device once
    by_length = rank_correlation(rollout.lengths, values[len(found) :])
    rewards = rollout.rewards if len(rollout.rewards) > 1 else {}
    metrics = dict(zip(found, values, strict=False)) | {f"reward_{name}": mean for name, mean in rewards.items()}
    return metrics if by_length is None else metrics | {"length_correlation": by_length}


def explained_variance(values: Tensor, returns: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """Return () 1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for one that predicts the mean.

    A return is a sum that includes values, so its rounding error grows with the values. Var(return) counts as at least
    this error: the result is large and negative for a critic that diverges, also if its values exceed the returns a
    million times. If the returns differ by rounding only and all answers have the same reward, the result is 0.
    """
    largest = torch.where(mask, torch.maximum(returns.abs(), values.abs()), 0.0).max()
    spread, rounding = masked_variance(returns, mask), (RETURN_ROUNDING * largest).square()
    totals = rewards.sum(1)
    is_uniform = totals.amax() - totals.amin() <= RETURN_ROUNDING * totals.abs().amax()
    explained = 1.0 - masked_variance(returns - values, mask) / torch.maximum(spread, rounding)
    return torch.where(is_uniform & (spread <= rounding), 0.0, explained)


def log_generator_gap(gap: float) -> None:
    """Log a warning if the generator and the trainer give different probabilities."""
    if gap > GENERATOR_GAP and distributed.is_rank_zero():
        logging.getLogger("zerochat").warning(
            "the probabilities of generator and trainer differ by %.3f on average (normal is below %.2f), so that "
            "rollouts are off-policy: set ppo.importance_cap=2",
            gap,
            GENERATOR_GAP,
        )


def write_rollout_log(
    folder: Path,
    step: int,
    rollout: Rollout,
    advantages: Advantages,
    text: Callable[[list[int]], str],
    *,
    answers: int,
    tokens: bool,
) -> None:
    """Append the first `answers` of a rollout to rollouts.jsonl; `tokens` adds the values of each token.

    `text` decodes token ids, control tokens included.
    """
    if not answers or not distributed.is_rank_zero():
        return
    lines = "".join(
        json.dumps({"step": step, **line}, ensure_ascii=False) + "\n"
        for line in log_lines(rollout, advantages, text, answers=answers, tokens=tokens)
    )
    with explained_disk(folder), (folder / ROLLOUTS).open("a", encoding="utf-8", newline="\n") as file:
        file.write(lines)


def log_lines(
    rollout: Rollout, advantages: Advantages, text: Callable[[list[int]], str], *, answers: int, tokens: bool
) -> list[dict[str, Any]]:
    """Return the lines of the first answers.

    kl: sum of the log-ratios to the reference
    reward: score, penalties, and the KL if that counts in the reward
    advantage: mean over the tokens
    """
    count = min(answers, len(rollout))
    tables = _to_host(
        count,
        logprobs=rollout.logprobs,
        generator=rollout.generator,
        reference=rollout.reference,
        values=rollout.values,
        rewards=advantages.rewards,
        returns=advantages.returns,
        advantages=advantages.advantages,
        score=rollout.scores,
        finished=rollout.finished,
        function_score=rollout.function,
    )
    numbers = {name: tables.pop(name) for name in ("score", "finished", "function_score") if name in tables}
    lines = []
    for i in range(count):
        length = rollout.lengths[i]
        row = {name: table[i, :length] for name, table in tables.items()}
        line = {
            "prompt": text(rollout.prompts[i]),
            "answer": text(rollout.responses[i]),
            "finished": bool(numbers["finished"][i]),
            "tokens": length,
            "score": numbers["score"][i].item(),
            "reward": row["rewards"].sum().item(),
            "advantage": row["advantages"].mean().item(),
        }
        if "function_score" in numbers:
            line["function_score"] = numbers["function_score"][i].item()
        if "reference" in row:
            line["kl"] = kl_k1(row["logprobs"], row["reference"]).sum().item()
        if tokens:
            line["token_ids"] = rollout.responses[i]
            if rollout.sampled is not None:
                line["sampled"] = rollout.sampled[i]
            line |= {name: [float(f"{value:.6g}") for value in values.tolist()] for name, values in row.items()}
        lines.append(line)
    return lines


def _to_host(count: int, **tensors: Tensor | None) -> dict[str, Tensor]:
    """Return the first `count` rows of each tensor, (count, columns) fp32, copied to the host together."""
    rows = {name: tensor[:count].float().reshape(count, -1) for name, tensor in tensors.items() if tensor is not None}
    copies = torch.cat([*rows.values()], dim=1).cpu().split([table.shape[1] for table in rows.values()], dim=1)
    return dict(zip(rows, copies, strict=True))
