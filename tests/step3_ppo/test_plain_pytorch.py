"""Two rollouts of PPO with their updates, computed again in float64 with transformers, PyTorch and nothing else."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.parallel import dtensors
from step3_ppo.log import rollout_metrics
from tests.step3_ppo.example_rollouts import learn
from tests.step3_ppo.test_stage import ppo_of

TEMPERATURE, REWARD_MEAN, REWARD_STD = 0.9, 0.75, 1.5  # of `config` and `write_run` in test_stage.py
KEYS: dict[str, Any] = {
    "update_epochs": 2, "micro_batch_tokens": 40, "lr": 0.02, "critic_lr": 0.05, "eps": 0.1, "weight_decay": 0.1,
    "max_grad_norm": 0.4, "ema": 0.6, "lam": 0.8, "entropy_coef": 0.02,
    "kl_coef": 0.2, "kl_target": 0.5, "kl_horizon": 30,
    "score_clip": 1.2, "missing_end_penalty": 0.5, "length_penalty": 0.05, "length_free": 3,
}  # fmt: skip
WITH_KL_IN_LOSS = ("grpo", "reinforce_baseline")


def optimizer_of(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": vectors, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95), eps=0.1)


class PlainPpo:
    """PPO without batches, packing and shared prompts: one sequence at a time."""

    def __init__(self, folder: Path, advantage: str, samples: int) -> None:
        self.actor, self.reference = (
            AutoModelForCausalLM.from_pretrained(folder / "sft" / "model").double() for _ in range(2)
        )
        self.critic, self.reward_model = (
            AutoModelForSequenceClassification.from_pretrained(folder / "reward" / "model").double() for _ in range(2)
        )
        self.advantage, self.samples, self.kl_coef = advantage, samples, 0.2
        self.optimizers = optimizer_of(self.actor, 0.02), optimizer_of(self.critic, 0.05)
        self.average = {name: torch.zeros_like(p) for name, p in self.actor.named_parameters()}  # without correction

    def logprobs(self, model: Any, prompt: list[int], answer: list[int]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the answer's tokens, (R,) each."""
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logs = (logits / TEMPERATURE).log_softmax(-1)
        return logs.gather(1, torch.tensor(answer)[:, None])[:, 0], -(logs.exp() * logs).sum(-1)

    def values(self, model: Any, ids: list[int]) -> Tensor:
        """Return the value of each position, (T,)."""
        hidden: Tensor = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        return hidden @ model.score.weight[0]

    def values_before(self, prompt: list[int], answer: list[int]) -> Tensor:
        """Return the critic's value before each token of the answer, (R,); zeros without a critic."""
        if self.advantage != "gae":
            return torch.zeros(len(answer))
        return self.values(self.critic, prompt + answer)[len(prompt) - 1 : -1]

    def estimate(self, rewards: list[Tensor], values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return advantages and returns of each answer."""
        if self.advantage == "gae":
            advantages = []
            for reward, value in zip(rewards, values, strict=True):
                deltas = reward + torch.cat([value[1:], torch.zeros(1)]) - value
                sums = [sum(0.8 ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
                advantages.append(torch.stack(sums))
        else:
            totals, above = [each.sum().item() for each in rewards], list[float]()
            for first in range(0, len(totals), self.samples):
                group = totals[first : first + self.samples]
                mean, factor = statistics.fmean(group), 1.0
                if self.advantage == "rloo":
                    factor = self.samples / (self.samples - 1)
                elif self.advantage == "grpo":
                    factor = 1 / (statistics.stdev(group) + 1e-6)
                above += [(total - mean) * factor for total in group]
            advantages = [torch.full_like(each, a) for each, a in zip(rewards, above, strict=True)]
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        if self.advantage in ("gae", "reinforce_baseline"):
            flat = torch.cat(advantages)
            advantages = [(each - flat.mean()) / flat.std(unbiased=False) for each in advantages]
        return advantages, returns

    def iterate(self, pairs: Sequence[tuple[list[int], list[int]]], finished: list[bool], end: int) -> dict[str, float]:
        """Score prompts with answers, and take two steps with actor and critic. Return the metrics."""
        tokens, in_loss = sum(len(answer) for _, answer in pairs), self.advantage in WITH_KL_IN_LOSS
        with torch.no_grad():
            old = [self.logprobs(self.actor, *pair)[0] for pair in pairs]
            reference = [self.logprobs(self.reference, *pair)[0] for pair in pairs]
            values = [self.values_before(*pair) for pair in pairs]
            scores = [self.values(self.reward_model, [*p, *a[:-1], end])[-1].item() - REWARD_MEAN for p, a in pairs]
        log_ratios, rewards = [a - b for a, b in zip(old, reference, strict=True)], []
        for (_, answer), score, is_finished, ratio in zip(pairs, scores, finished, log_ratios, strict=True):
            reward = torch.zeros_like(ratio) if in_loss else -self.kl_coef * ratio
            reward[-1] += max(-1.2, min(1.2, score)) - 0.5 * REWARD_STD * (not is_finished)
            reward[-1] -= 0.05 * max(0, len(answer) - 3)
            rewards.append(reward)
        advantages, returns = self.estimate(rewards, values)
        losses = [self.step(pairs, old, reference, advantages, values, returns) for _ in range(2)]
        found = {name: statistics.fmean(step[name] for step in losses) / tokens for name in losses[0]}
        kl = statistics.fmean(ratio.sum().item() for ratio in log_ratios)
        self.kl_coef *= 1 + max(-0.2, min(0.2, kl / 0.5 - 1)) * len(pairs) / 30
        total = statistics.fmean(reward.sum().item() for reward in rewards)
        return found | {"kl": kl, "reward": total, "score": statistics.fmean(scores)}

    def step(
        self, pairs: Any, old: Any, reference: Any, advantages: Any, values: Any, returns: Any
    ) -> dict[str, float]:
        """Take one step with actor and critic. Return sums over tokens."""
        policy_loss = value_loss = entropy = torch.zeros(())
        rows = zip(pairs, old, reference, advantages, values, returns, strict=True)
        for (prompt, answer), before, base, advantage, value, target in rows:
            logs, entropies = self.logprobs(self.actor, prompt, answer)
            ratio = (logs - before).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            loss = torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss) - 0.02 * entropies
            if self.advantage in WITH_KL_IN_LOSS:
                loss = loss + self.kl_coef * ((base - logs).exp() - 1 - (base - logs))
            policy_loss, entropy = policy_loss + loss.sum(), entropy + entropies.sum()
            new = self.values_before(prompt, answer)
            near = torch.minimum(torch.maximum(new, value - 0.2), value + 0.2)
            value_loss = value_loss + 0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2).sum()
        tokens = sum(len(answer) for _, answer in pairs)
        critic = {"value_loss": value_loss.item()} if self.advantage == "gae" else {}
        models, losses = (self.actor, self.critic), (policy_loss, value_loss)
        for model, optimizer, loss in [*zip(models, self.optimizers, losses, strict=True)][: len(critic) + 1]:
            optimizer.zero_grad()
            (loss / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.actor.named_parameters():
                self.average[name].mul_(0.6).add_(parameter, alpha=0.4)
        return {"policy_loss": policy_loss.item(), "entropy": entropy.item()} | critic


@pytest.mark.parametrize(("advantage", "samples"), [("gae", 1), ("rloo", 3), ("grpo", 3), ("reinforce_baseline", 3)])
def test_two_rollouts_equal_plain_pytorch(advantage: str, samples: int, run_folder: Path) -> None:
    estimator = {"kl_estimator": "k3"} if advantage in WITH_KL_IN_LOSS else {}
    keys = KEYS | estimator | {"advantage": advantage, "samples": samples, "batch_size": 6 // samples}
    ppo, stage = ppo_of(run_folder, **keys)
    plain, seen = PlainPpo(run_folder, advantage, samples), set[bool]()
    for step in (1, 2):
        rollout = ppo.collect(step, stage)
        advantages = ppo.compute_advantages(rollout)
        figures = rollout_metrics(rollout, advantages) | learn(ppo, step, rollout, advantages, stage.budget)
        finished = rollout.finished.tolist()
        expected = plain.iterate(
            [*zip(rollout.prompts, rollout.responses, strict=True)], finished, ppo.tokenizer.end_id
        )
        assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
        ppo.kl = ppo.kl.after(figures["kl"], len(rollout))
        seen.update(finished)
    assert ppo.kl.coef == pytest.approx(plain.kl_coef, rel=1e-5) and ppo.kl.coef != 0.2
    assert False in seen
    after_four_steps = 1 - math.pow(0.6, 4)
    with ppo.models.actor.averaged():
        averaged = dict(ppo.models.actor.module.lm.named_parameters())
        for name, mean in plain.average.items():
            actual = dtensors.full_tensor(averaged[name].detach()).double()
            torch.testing.assert_close(actual, mean / after_four_steps, atol=2e-6, rtol=1e-5)
    for name, parameter in ppo.models.critic.module.model.named_parameters() if ppo.models.critic else ():
        torch.testing.assert_close(parameter.double(), plain.critic.get_parameter(name), atol=2e-6, rtol=1e-5)
