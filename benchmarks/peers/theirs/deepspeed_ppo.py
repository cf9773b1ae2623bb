"""PPO iterations on DeepSpeed ZeRO-3: four engines, transformers' `generate` on the sharded policy, one epoch."""

import os
import time
from itertools import pairwise
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import median
from benchmarks.peers.children import report, told
from benchmarks.peers.theirs import plain_ppo as plain
from benchmarks.peers.theirs.made import model


def main() -> None:
    """Iterate, and tell the iterations' times."""
    work = told()
    torch.set_num_threads(work["threads"])
    deepspeed.init_distributed(dist_backend="gloo")
    policy, reference = _engine(work, learns=True), _engine(work, learns=False)
    critic, reward = _engine(work, scores=True, learns=True), _engine(work, scores=True, learns=False)
    models = (policy, critic, reference, reward)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = torch.tensor(work["prompts"][rank::ranks])
    clocks = [_iteration(models, mine, work["new_tokens"]) for _ in range(work["warmup"] + work["steps"])]
    measured = clocks[work["warmup"] :]
    if rank == 0:
        phases = {name: median([clock[name] for clock in measured]) for name in measured[0]}
        tokens = float(len(work["prompts"]) * work["new_tokens"])
        report([sum(clock.values()) for clock in measured], [tokens] * len(measured), phases=phases)


def _engine(work: dict[str, Any], *, learns: bool, scores: bool = False) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 1.0,
    }
    if learns:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": work["lr"]}}
    made = model(work["shape"], scores=scores).eval()
    made.config.use_cache = not scores
    if not scores:
        made.generation_config.eos_token_id = None  # all answers have their full length
    engine, *_ = deepspeed.initialize(model=made, config=config, model_parameters=made.parameters() if learns else None)
    return engine


def _iteration(models: Any, prompts: Tensor, new_tokens: int) -> dict[str, float]:
    """One rollout and one epoch on it; the seconds of each phase."""
    policy, critic, reference, reward = models
    shown = prompts.shape[1]
    times = [time.perf_counter()]
    with torch.no_grad():
        ids = policy.module.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=1,
        )
        times.append(time.perf_counter())
        old = _logprobs(policy, ids, shown)
        shaped = -plain.KL * (old - _logprobs(reference, ids, shown))
        values = _values(critic, ids)[:, shown - 1 : -1]
        shaped[:, -1] += _values(reward, ids)[:, -1]
        times.append(time.perf_counter())
        advantages = plain._gae(shaped, values)
    returns = advantages + values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy.backward(plain._policy_loss(_logprobs(policy, ids, shown), old, advantages))
    policy.step()
    critic.backward(plain._value_loss(_values(critic, ids)[:, shown - 1 : -1], values, returns))
    critic.step()
    times.append(time.perf_counter())
    names = ("generate", "score", "train")
    return {name: after - before for name, (before, after) in zip(names, pairwise(times), strict=True)}


def _logprobs(engine: Any, ids: Tensor, shown: int) -> Tensor:
    """(B, R) of the response tokens."""
    logits = engine(input_ids=ids, use_cache=False).logits[:, shown - 1 : -1].float()
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, shown:].flatten(), reduction="none").view(len(ids), -1)


def _values(engine: Any, ids: Tensor) -> Tensor:
    """(B, T) after each token: the head on every position, which the classifier's own forward does not give."""
    found: list[Tensor] = []
    handle = engine.module.score.register_forward_hook(lambda _, __, out: found.append(out))
    engine(input_ids=ids, use_cache=False)
    handle.remove()
    return found[0].float().squeeze(-1)


if __name__ == "__main__":
    main()
