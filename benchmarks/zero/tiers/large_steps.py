"""Full-parameter SFT steps of a model's shape with random weights, optimizer in files: `MODEL STEPS LENGTH`.

One rank, ZeRO-3, bf16, activations computed twice: what a machine without room for the model states would choose.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
import yaml

from benchmarks.zero.tiers.disk import folder
from engine import OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch, true_indices
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from step1_sft.train import loss_of

MODELS = Path(__file__).resolve().parents[3] / "conf" / "model"


def main(name: str, steps: int, length: int) -> None:
    """Print seconds, losses and bytes as JSON."""
    world = dist.start("large", device="cpu")
    fields = yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8"))["architecture"]
    settings = EngineSettings(
        zero_stage=3, dtype="bf16", offload_optimizer="nvme", nvme_path=folder(), activation_checkpointing=True
    )
    model = ModelConfig(name=name, weights="random", architecture=fields)
    began = time.monotonic()
    choice = EngineChoice(settings, OptimizerConfig(lr=1e-5, schedule="constant"))
    engine = build_policy(resolve(model, seed=1), choice)
    built, seconds, losses = time.monotonic() - began, [], []
    for step in range(steps):
        began = time.monotonic()
        ids = torch.randint(4, fields["vocab_size"], (1, length), generator=torch.Generator().manual_seed(step))
        counts = torch.ones_like(ids, dtype=torch.bool)
        counts[:, 0] = False
        losses.append(engine.update([TokenBatch(ids, true_indices(counts))], loss_of, int(counts.sum())).loss)
        seconds.append(time.monotonic() - began)
        print(f"{name} step {step}: {seconds[-1]:.1f} s, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    assert isinstance(engine.optimizer, OffloadedOptimizer)
    found = {
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "build_seconds": built,
        "step_seconds": seconds,
        "losses": losses,
        "nvme_bytes": engine.optimizer.bytes["nvme"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ranks": world.size,
    }
    print(json.dumps(found), flush=True)
    dist.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
