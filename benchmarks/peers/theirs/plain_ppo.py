"""PPO iterations as one writes them with transformers and plain PyTorch, computing in the work's precision.

fp32 weights, `generate` with its dynamic cache, log-probabilities from the logits of the response, fused AdamW; one
epoch, one batch.
"""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.measure import median
from benchmarks.peers.children import report, told

CLIP, VALUE_CLIP, KL, LAM = 0.2, 0.2, 0.05, 0.95


def main() -> None:
    """Iterate, and tell the iterations' times."""
    work = told()
    torch.set_num_threads(work["threads"])
    torch.manual_seed(1)
    policy, reference = (_model(AutoModelForCausalLM, work) for _ in range(2))
    critic, reward = (_model(AutoModelForSequenceClassification, work) for _ in range(2))
    reference.requires_grad_(False)
    reward.requires_grad_(False)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(each.parameters(), lr=work["lr"], fused=True) for each in (policy, critic)
    ]
    models = (policy, critic, reference, reward)
    clocks = [_iteration(models, optimizers, work) for _ in range(work["warmup"] + work["steps"])]
    measured = clocks[work["warmup"] :]
    phases = {name: median([clock[name] for clock in measured]) for name in measured[0]}
    tokens = float(len(work["prompts"]) * work["new_tokens"])
    report([sum(clock.values()) for clock in measured], [tokens] * len(measured), phases=phases)


def _model(auto: Any, work: dict[str, Any]) -> Any:
    fields = {**work["shape"], "num_labels": 1, "attention_dropout": 0.0}
    model = auto.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).eval()
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # all answers have their full length
    return model


def _iteration(models: Any, optimizers: list[torch.optim.Optimizer], work: dict[str, Any]) -> dict[str, float]:
    """One rollout and one epoch on it; the seconds of each phase."""
    policy, critic, reference, reward = models
    prompts = torch.tensor(work["prompts"])
    shown = prompts.shape[1]
    times = [time.perf_counter()]
    with torch.no_grad(), _autocast(work):
        ids = policy.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work["new_tokens"],
            do_sample=True,
            top_k=0,
            pad_token_id=1,
        )
        times.append(time.perf_counter())
        old = _logprobs(policy, ids, shown)
        shaped = -KL * (old - _logprobs(reference, ids, shown))
        values = _values(critic, ids)[:, shown - 1 : -1]
        shaped[:, -1] += _values(reward, ids)[:, -1]
        times.append(time.perf_counter())
        advantages = _gae(shaped, values)
    returns = advantages + values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    _step(policy, optimizers[0], lambda: _policy_loss(_logprobs(policy, ids, shown), old, advantages), work)
    _step(critic, optimizers[1], lambda: _value_loss(_values(critic, ids)[:, shown - 1 : -1], values, returns), work)
    times.append(time.perf_counter())
    assert ids.shape[1] == shown + work["new_tokens"]
    return {
        name: after - before
        for name, (before, after) in zip(("generate", "score", "train"), pairwise(times), strict=True)
    }


def _autocast(work: dict[str, Any]) -> torch.autocast:
    """Compute in the work's precision; fp32 needs no autocast."""
    return torch.autocast("cpu", torch.bfloat16, enabled=work["precision"] == "bf16")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, work: dict[str, Any]) -> None:
    with _autocast(work):
        value = loss()
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _logprobs(model: Any, ids: Tensor, shown: int) -> Tensor:
    """(B, R) of the response tokens; the head runs on these alone."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, shown - 1 : -1]
    logits = model.lm_head(hidden).float()
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, shown:].flatten(), reduction="none").view(len(ids), -1)


def _values(model: Any, ids: Tensor) -> Tensor:
    """(B, T) after each token."""
    values: Tensor = model.score(model.model(input_ids=ids, use_cache=False).last_hidden_state).float().squeeze(-1)
    return values


def _gae(rewards: Tensor, values: Tensor) -> Tensor:
    advantages, following = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        after = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        following = rewards[:, t] + after - values[:, t] + LAM * following
        advantages[:, t] = following
    return advantages


def _policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()


def _value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    clipped = values.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square()).mean()


if __name__ == "__main__":
    main()
