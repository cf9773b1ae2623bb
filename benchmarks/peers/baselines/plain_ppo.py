"""PPO iterations with transformers and plain PyTorch, in the task's precision.

fp32 weights, `generate` with its dynamic cache, log-probabilities from the logits of the response, fused AdamW, one
epoch, one batch.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
    optimizers = {
        module: torch.optim.AdamW(module.parameters(), lr=task["lr"], fused=True) for module in (policy, critic)
    }

    def autocast() -> torch.autocast:  # fp32 needs none
        return torch.autocast("cpu", torch.bfloat16, enabled=task["precision"] == "bf16")

    def update(model: nn.Module, loss: Callable[[], Tensor]) -> None:
        with autocast():
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[model].step()
        optimizers[model].zero_grad(set_to_none=True)

    calls = Calls(partial(sample, new_tokens=task["new_tokens"]), _logprobs, _values, update, autocast)
    models, prompts = (policy, critic, reference, reward), torch.tensor(task["prompts"])
    report_phases([iterate(models, prompts, calls) for _ in range(task["warmup"] + task["steps"])], task)


def _model(auto: Any, task: dict[str, Any]) -> Any:
    fields = {**task["shape"], "num_labels": 1, "attention_dropout": 0.0}
    model = auto.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).eval()
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # every answer has its full length
    return model


@dataclass(frozen=True)
class Calls:
    """The parts of an iteration that differ between the baselines.

    generate(policy, prompts (B, P)): prompts with answers, (B, T). logprobs(policy, ids, P): of the answers, (B, R).
    values(scorer, ids): after each token, (B, T). update(model, loss): a step on the loss that `loss()` returns.
    scoring(): the context of generation and scores.
    """

    generate: Callable[[Any, Tensor], Tensor]
    logprobs: Callable[[Any, Tensor, int], Tensor]
    values: Callable[[Any, Tensor], Tensor]
    update: Callable[[Any, Callable[[], Tensor]], None]
    scoring: Callable[[], AbstractContextManager[Any]] = nullcontext


def iterate(models: Sequence[Any], prompts: Tensor, calls: Calls) -> dict[str, float]:
    """Run one rollout and one epoch on it; return the seconds of each phase."""
    policy, critic, reference, reward = models
    prompt_length = prompts.shape[1]
    times = [time.perf_counter()]
    with torch.no_grad(), calls.scoring():
        ids = calls.generate(policy, prompts)
        times.append(time.perf_counter())
        old = calls.logprobs(policy, ids, prompt_length)
        kl = old - calls.logprobs(reference, ids, prompt_length)
        values = calls.values(critic, ids)[:, prompt_length - 1 : -1]
        scores = calls.values(reward, ids)[:, -1]
        times.append(time.perf_counter())
    advantages, returns = whitened_gae(kl, scores, values)
    calls.update(policy, lambda: policy_loss(calls.logprobs(policy, ids, prompt_length), old, advantages))
    calls.update(critic, lambda: value_loss(calls.values(critic, ids)[:, prompt_length - 1 : -1], values, returns))
    times.append(time.perf_counter())
    names = ("generate", "score", "train")
    return {name: after - before for name, (before, after) in zip(names, pairwise(times), strict=True)}


def sample(model: Any, prompts: Tensor, new_tokens: int) -> Tensor:
    """Return prompts with answers of `new_tokens` tokens, by transformers' `generate`."""
    ids: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=1,
    )
    assert ids.shape[1] == prompts.shape[1] + new_tokens
    return ids


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
