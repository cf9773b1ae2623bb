"""Training steps of the engine and of DeepSpeed at the same ZeRO stage: 2 ranks of one thread, OPT-125M shape.

Both sides compute in `cpu_precision` with fp32 masters. They get the same tokens, learning rate and clipping. Each uses
its usual loss: the loss of the SFT stage, and the `labels=` loss of transformers. The first `WARM_UP` steps of a run
are not measured.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_precision
from benchmarks.measure import in_turn, median, spread
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.deepspeed_work import LEARNING_RATE, LENGTH, ROWS, architecture, rows_of_rank, run_steps
from engine import OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.batch import TokenBatch, true_indices
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from step1_sft.train import loss_of

RANKS, STEPS, WARM_UP = 2, 6, 2
TOKENS = ROWS * LENGTH  # per step, over all ranks


@dataclass(frozen=True)
class Run:
    """One run of one side: median seconds of a step, the largest peak resident bytes of a rank, rank 0's losses."""

    seconds: float
    peak_bytes: int
    losses: Sequence[float]


def measure(rounds: int, stage: int) -> Result:
    """Return the tokens per second of both sides at a ZeRO stage. The sides run in turn. Raises BenchFailed."""
    python = environment("deepspeed", DEEPSPEED)
    sides = {
        "ours": partial(train, Path(sys.executable), __name__, stage),
        "peer": partial(train, python, "benchmarks.zero.deepspeed_steps", stage),
    }
    runs = in_turn(sides, rounds)
    rates = {side: [TOKENS / run.seconds for run in side_runs] for side, side_runs in runs.items()}
    gib = {side: median([run.peak_bytes / 2**30 for run in side_runs]) for side, side_runs in runs.items()}
    return Result(
        bench="zero",
        case=f"deepspeed{stage}",
        ours=median(rates["ours"]),
        peer=median(rates["peer"]),
        unit="tokens/s",
        lower_is_better=False,
        detail={
            "ranks": RANKS,
            "peer": DEEPSPEED[0],
            "dtype": cpu_precision(),
            "peak_host_gib_a_rank": gib,
            "runs": rates,
            "spread": {side: spread(values) for side, values in rates.items()},
            "losses": {side: side_runs[-1].losses for side, side_runs in runs.items()},
        },
    )


def train(python: Path, module: str, stage: int) -> Run:
    """Run one side once. Raises BenchFailed."""
    return summarize(run_ranks(module, [str(stage), str(STEPS), cpu_precision()], RANKS, python=python))


def summarize(ranks: Sequence[Mapping[str, Any]]) -> Run:
    """Return the figures of a run from the objects that its ranks printed."""
    peak = max(int(rank["peak_bytes"]) for rank in ranks)
    return Run(median(ranks[0]["seconds"][WARM_UP:]), peak, ranks[0]["losses"])


def main(stage: int, steps: int, precision: str) -> None:
    """Train one rank on random tokens with our engine and the loss of the SFT stage, on one thread."""
    torch.set_num_threads(1)
    world, fields = dist.start("steps", device="cpu"), architecture()
    optimizer = OptimizerConfig(lr=LEARNING_RATE, schedule="constant", betas=(0.9, 0.999), decay="all")
    choice = EngineChoice(EngineSettings(zero_stage=stage, dtype=precision), optimizer)  # type: ignore[arg-type]
    model = ModelConfig(name="opt-125m", weights="random", architecture=fields)
    engine = build_policy(resolve(model, seed=1), choice)

    def step(number: int) -> float:
        ids = rows_of_rank(number, world.rank, world.size, fields["vocab_size"])
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        return engine.update([TokenBatch(ids, true_indices(mask))], loss_of, int(mask.sum()) * world.size).loss

    run_steps(step, dist.barrier, steps)
    dist.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
