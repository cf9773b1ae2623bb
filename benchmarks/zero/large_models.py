"""Peak resident memory of SFT steps on OPT shapes whose model states exceed a small machine's memory.

One rank trains all parameters with random weights: ZeRO-3, bf16, optimizer states on NVMe, activation checkpointing.
"""

import json
import resource
import sys
import time

import torch

from benchmarks.measure import median
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.deepspeed_work import architecture
from benchmarks.zero.nvme import nvme_folder
from engine import OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch, true_indices
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from step1_sft.train import loss_of

STEPS, LENGTH, THREADS = 2, 512, 2


def measure(rounds: int, case: str, model: str, at_most_gib: float) -> Result:
    """Return the peak in GiB; `at_most_gib` is its bound. Runs once: the memory does not vary."""
    (figures,) = run_ranks(__name__, [model], 1, threads=THREADS)
    return Result(
        bench="zero",
        case=case,
        ours=figures["peak_bytes"] / 2**30,
        unit="GiB peak resident",
        lower_is_better=True,
        detail={
            "at_most": at_most_gib,
            "parameters": figures["parameters"],
            "model_states_gib": 16 * figures["parameters"] / 2**30,
            "nvme_gib": figures["nvme_bytes"] / 2**30,
            "build_seconds": figures["build_seconds"],
            "step_seconds": figures["step_seconds"],
            "tokens_per_second": LENGTH / median(figures["step_seconds"]),
            "losses": figures["losses"],
        },
    )


def main(name: str) -> None:
    """Train `STEPS` steps of `LENGTH` tokens; print seconds, losses and bytes as JSON."""
    dist.start("large", device="cpu")
    settings = EngineSettings(
        zero_stage=3, dtype="bf16", offload_optimizer="nvme", nvme_path=nvme_folder(), activation_checkpointing=True
    )
    model = model_config(name)
    assert model.architecture is not None
    start = time.monotonic()
    choice = EngineChoice(settings, OptimizerConfig(lr=1e-5, schedule="constant"))
    engine = build_policy(resolve(model, seed=1), choice)
    build_seconds, step_seconds, losses = time.monotonic() - start, [], []
    for step in range(STEPS):
        start = time.monotonic()
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(4, model.architecture["vocab_size"], (1, LENGTH), generator=generator)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        losses.append(engine.update([TokenBatch(ids, true_indices(mask))], loss_of, int(mask.sum())).loss)
        step_seconds.append(time.monotonic() - start)
        print(f"{name} step {step}: {step_seconds[-1]:.1f} s, loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    assert isinstance(engine.optimizer, OffloadedOptimizer)
    figures = {
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "build_seconds": build_seconds,
        "step_seconds": step_seconds,
        "losses": losses,
        "nvme_bytes": engine.optimizer.bytes["nvme"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures), flush=True)
    dist.stop()


def model_config(name: str) -> ModelConfig:
    """Return the model of conf/model/`name`.yaml with random weights."""
    return ModelConfig(name=name, weights="random", architecture=architecture(name))


if __name__ == "__main__":
    main(sys.argv[1])
