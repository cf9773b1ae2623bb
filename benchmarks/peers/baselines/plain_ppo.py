"""PPO iterations with transformers and plain PyTorch, in the task's precision.

fp32 weights, `generate` with its dynamic cache, log-probabilities from the logits of the response, fused AdamW, one
epoch, one batch.
"""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.peers.child_process import read_task, report_phases

CLIP, VALUE_CLIP, KL_COEF, LAM = 0.2, 0.2, 0.05, 0.95


def main() -> None:
    """Run the iterations; report their seconds."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    torch.manual_seed(1)
    policy, reference = (_model(AutoModelForCausalLM, task) for _ in range(2))
    critic, reward = (_model(AutoModelForSequenceClassification, task) for _ in range(2))
    reference.requires_grad_(False)
    reward.requires_grad_(False)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(module.parameters(), lr=task["lr"], fused=True) for module in (policy, critic)
    ]
    models = (policy, critic, reference, reward)
    iterations = [_iterate(models, optimizers, task) for _ in range(task["warmup"] + task["steps"])]
    report_phases(iterations, task)


def _model(auto: Any, task: dict[str, Any]) -> Any:
    fields = {**task["shape"], "num_labels": 1, "attention_dropout": 0.0}
    model = auto.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).eval()
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # every answer has its full length
    return model


def _iterate(models: Any, optimizers: list[torch.optim.Optimizer], task: dict[str, Any]) -> dict[str, float]:
    """Run one rollout and one epoch on it; return the seconds of each phase."""
    policy, critic, reference, reward = models
    prompts = torch.tensor(task["prompts"])
    prompt_length = prompts.shape[1]
    times = [time.perf_counter()]
    with torch.no_grad(), _autocast(task):
        ids = policy.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=task["new_tokens"],
            do_sample=True,
            top_k=0,
            pad_token_id=1,
        )
        times.append(time.perf_counter())
        old = _logprobs(policy, ids, prompt_length)
        kl = old - _logprobs(reference, ids, prompt_length)
        values = _values(critic, ids)[:, prompt_length - 1 : -1]
        scores = _values(reward, ids)[:, -1]
        times.append(time.perf_counter())
    advantages, returns = whitened_gae(kl, scores, values)
    _step(policy, optimizers[0], lambda: policy_loss(_logprobs(policy, ids, prompt_length), old, advantages), task)
    _step(
        critic,
        optimizers[1],
        lambda: value_loss(_values(critic, ids)[:, prompt_length - 1 : -1], values, returns),
        task,
    )
    times.append(time.perf_counter())
    assert ids.shape[1] == prompt_length + task["new_tokens"]
    return {
        name: after - before
        for name, (before, after) in zip(("generate", "score", "train"), pairwise(times), strict=True)
    }


def _autocast(task: dict[str, Any]) -> torch.autocast:
    """Return the autocast of the task's precision; fp32 needs none."""
    return torch.autocast("cpu", torch.bfloat16, enabled=task["precision"] == "bf16")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, task: dict[str, Any]) -> None:
    with _autocast(task):
        value = loss()
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _logprobs(model: Any, ids: Tensor, prompt_length: int) -> Tensor:
    """Return log-probabilities (B, R). The head runs on response tokens only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt_length - 1 : -1]
    logits = model.lm_head(hidden).float()
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, prompt_length:].flatten(), reduction="none").view(len(ids), -1)


def _values(model: Any, ids: Tensor) -> Tensor:
    """Return the value after each token, (B, T)."""
    values: Tensor = model.score(model.model(input_ids=ids, use_cache=False).last_hidden_state).float().squeeze(-1)
    return values


def whitened_gae(kl: Tensor, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return whitened advantages and returns, (B, R), from KL terms and values (B, R) and scores (B,)."""
    rewards = -KL_COEF * kl
    rewards[:, -1] += scores
    advantages = _gae(rewards, values)
    returns = advantages + values
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns


def _gae(rewards: Tensor, values: Tensor) -> Tensor:
    advantages, following = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        after = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        following = rewards[:, t] + after - values[:, t] + LAM * following
        advantages[:, t] = following
    return advantages


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    clipped = values.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square()).mean()


if __name__ == "__main__":
    main()
