"""Communication compression: fewer bytes, and the effect on the loss curve. 2 ranks, bf16, a small model.

Neither figure depends on the machine's speed. Each variant has an uncompressed base: plain ZeRO-2 for 8-bit
collectives, Adam at ZeRO stage 0 for 1-bit Adam. The model learns an artificial language: a Markov chain in which each
word has eight successors. No model reaches a loss below ln 8 = 2.08 nats per word.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import median
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from engine import OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch, true_indices
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from step1_sft.train import loss_of

STEPS = 200
FINAL_STEPS = 20  # the mean loss of these steps is the end of a curve
WORDS, SUCCESSORS, ROWS, LENGTH = 512, 8, 16, 128
FREEZE_STEP = 60
SHAPE = {
    "model_type": "opt",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 1024,
    "word_embed_proj_dim": 256,
    "vocab_size": WORDS,
    "max_position_embeddings": LENGTH,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"zero_stage": 2},
    "gather8": {"zero_stage": 2, "compress": "gather8"},
    "reduce8": {"zero_stage": 2, "compress": "reduce8"},
    "both": {"zero_stage": 2, "compress": "both"},
    "adam": {"zero_stage": 0},
    "onebitadam": {"zero_stage": 0},
}
BASES = {"gather8": "none", "reduce8": "none", "both": "none", "onebitadam": "adam"}


def measure(rounds: int) -> Result:
    """Return the factor by which `both` reduces the bytes. Runs once: the numbers are the same in every round."""
    runs = {variant: train(variant) for variant in VARIANTS}
    factors = {variant: _bytes(runs[base]) / _bytes(runs[variant]) for variant, base in BASES.items()}
    return Result(
        bench="zero",
        case="wire",
        ours=factors["both"],
        unit="x fewer bytes",
        lower_is_better=False,
        detail={
            "steps": STEPS,
            "times_fewer_bytes": factors,
            "bytes_a_step": {variant: run["sent"] for variant, run in runs.items()},
            "end_of_curve": {variant: _final_loss(run["losses"]) for variant, run in runs.items()},
            "median_deviation": {v: deviation(runs[v]["losses"], runs[base]["losses"]) for v, base in BASES.items()},
            "curves": {variant: run["losses"][:: STEPS // 20] for variant, run in runs.items()},
        },
    )


def train(variant: str) -> Mapping[str, Any]:
    """Train on two ranks; return rank 0's losses and bytes sent."""
    rank0, _ = run_ranks(__name__, [variant], 2)
    print(f"{variant}: {_final_loss(rank0['losses']):.4f}", file=sys.stderr, flush=True)
    return rank0


def deviation(losses: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over steps of the relative difference between two curves."""
    return median([abs(a - b) / b for a, b in zip(losses, base, strict=True)])


def _final_loss(losses: Sequence[float]) -> float:
    return sum(losses[-FINAL_STEPS:]) / FINAL_STEPS


def _bytes(run: Mapping[str, Any]) -> int:
    return int(run["sent"]["gather"]) + int(run["sent"]["reduce"])


def main(variant: str) -> None:
    """Train one rank; print the losses and the bytes of the last step as JSON."""
    torch.set_num_threads(1)
    world = dist.start("compression", device="cpu")
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=20, total_steps=STEPS, schedule="linear", betas=(0.9, 0.99))
    if variant == "onebitadam":
        optimizer = replace(optimizer, name=variant, options={"freeze_step": FREEZE_STEP})
    settings = EngineSettings.model_validate({"dtype": "bf16", **VARIANTS[variant]})
    model = ModelConfig(name="small", weights="random", architecture=SHAPE)
    engine = build_policy(resolve(model, seed=1), EngineChoice(settings, optimizer))
    losses: list[float] = []
    sent: dict[str, int] = {}
    for step in range(STEPS):
        ids = sentences(step)[world.rank :: world.size]
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        update = engine.update([TokenBatch(ids, true_indices(mask))], loss_of, ROWS * (LENGTH - 1))
        losses.append(update.loss)
        sent = asdict(update.sent)
    print(json.dumps({"losses": losses, "sent": sent}), flush=True)
    dist.stop()


def sentences(step: int) -> Tensor:
    """Return the global batch of a step, (ROWS, LENGTH) token ids."""
    successors = torch.randint(WORDS, (WORDS, SUCCESSORS), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    words = [torch.randint(WORDS, (ROWS,), generator=generator)]
    for _ in range(LENGTH - 1):
        words.append(successors[words[-1], torch.randint(SUCCESSORS, (ROWS,), generator=generator)])
    return torch.stack(words, 1)


if __name__ == "__main__":
    main(sys.argv[1])
