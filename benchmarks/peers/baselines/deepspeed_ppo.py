"""PPO iterations on DeepSpeed ZeRO-3: four engines, transformers' `generate` on the sharded policy, one epoch."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.baselines.models import random_model
from benchmarks.peers.baselines.plain_ppo import Calls, iterate, sample
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
    calls = Calls(lambda engine, ids: sample(engine.module, ids, task["new_tokens"]), _logprobs, _values, _update)
    iterations = [iterate(models, prompts, calls) for _ in range(task["warmup"] + task["steps"])]
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


def _update(engine: Any, loss: Callable[[], Tensor]) -> None:
    engine.backward(loss())
    engine.step()


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
