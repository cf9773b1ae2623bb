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

from benchmarks.peers.baselines.models import random_model
from benchmarks.peers.baselines.plain_ppo import policy_loss, value_loss, whitened_gae
from benchmarks.peers.child_process import read_task, report_phases


def main() -> None:
    """Run the iterations; report their seconds."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    deepspeed.init_distributed(dist_backend="gloo")
    policy, reference = _engine(task, learns=True), _engine(task, learns=False)
    critic, reward = _engine(task, scores=True, learns=True), _engine(task, scores=True, learns=False)
    models = (policy, critic, reference, reward)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    prompts = torch.tensor(task["prompts"][rank::ranks])
    iterations = [_iterate(models, prompts, task["new_tokens"]) for _ in range(task["warmup"] + task["steps"])]
    if rank == 0:
        report_phases(iterations, task)


def _engine(task: dict[str, Any], *, learns: bool, scores: bool = False) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 1.0,
    }
    if learns:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": task["lr"]}}
    module = random_model(task["shape"], scores=scores).eval()
    module.config.use_cache = not scores
    if not scores:
        module.generation_config.eos_token_id = None  # every answer has its full length
    engine, *_ = deepspeed.initialize(
        model=module, config=config, model_parameters=module.parameters() if learns else None
    )
    return engine


def _iterate(models: Any, prompts: Tensor, new_tokens: int) -> dict[str, float]:
    """Run one rollout and one epoch on it; return the seconds of each phase."""
    policy, critic, reference, reward = models
    prompt_length = prompts.shape[1]
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
        old = _logprobs(policy, ids, prompt_length)
        kl = old - _logprobs(reference, ids, prompt_length)
        values = _values(critic, ids)[:, prompt_length - 1 : -1]
        scores = _values(reward, ids)[:, -1]
        times.append(time.perf_counter())
    advantages, returns = whitened_gae(kl, scores, values)
    policy.backward(policy_loss(_logprobs(policy, ids, prompt_length), old, advantages))
    policy.step()
    critic.backward(value_loss(_values(critic, ids)[:, prompt_length - 1 : -1], values, returns))
    critic.step()
    times.append(time.perf_counter())
    names = ("generate", "score", "train")
    return {name: after - before for name, (before, after) in zip(names, pairwise(times), strict=True)}


def _logprobs(engine: Any, ids: Tensor, prompt_length: int) -> Tensor:
    """Return log-probabilities (B, R)."""
    logits = engine(input_ids=ids, use_cache=False).logits[:, prompt_length - 1 : -1].float()
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, prompt_length:].flatten(), reduction="none").view(len(ids), -1)


def _values(engine: Any, ids: Tensor) -> Tensor:
    """Return the value after each token, (B, T). The classifier's own forward returns only one position."""
    outputs: list[Tensor] = []
    handle = engine.module.score.register_forward_hook(lambda _, __, out: outputs.append(out))
    engine(input_ids=ids, use_cache=False)
    handle.remove()
    return outputs[0].float().squeeze(-1)


if __name__ == "__main__":
    main()
