"""One PPO iteration on 2 ranks with ZeRO-3, against DeepSpeed ZeRO-3 with transformers' `generate`."""

from functools import partial

from benchmarks.machine import cpu_precision
from benchmarks.measure import in_turn, median, medians_by_name
from benchmarks.peers.child_process import measure
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.peers.ppo import make_task
from benchmarks.record import Result

RANKS = 2


def run(rounds: int) -> list[Result]:
    """Return seconds per iteration, with one thread per rank."""
    python = environment("deepspeed", DEEPSPEED)
    precision = cpu_precision()
    task = make_task(precision, steps=1, warmup=1) | {"threads": 1, "zero_stage": 3}
    sides = {
        "ours": partial(measure, "benchmarks.peers.ppo", task, ranks=RANKS),
        "deepspeed": partial(measure, "benchmarks.peers.baselines.deepspeed_ppo", task, python=python, ranks=RANKS),
    }
    runs = in_turn(sides, rounds)
    seconds = {side: median([s for figures in side_runs for s in figures.seconds]) for side, side_runs in runs.items()}
    phases = {
        side: medians_by_name([figures.more["phases"] for figures in side_runs]) for side, side_runs in runs.items()
    }
    return [
        Result(
            bench="peers",
            case="ppo_zero3",
            ours=seconds["ours"],
            unit="s an iteration",
            lower_is_better=True,
            peer=seconds["deepspeed"],
            detail={
                "dtype": precision,
                "ranks": RANKS,
                "peak_gib_a_rank": median([figures.peak_gib for figures in runs["ours"]]),
                "peer_peak_gib_a_rank": median([figures.peak_gib for figures in runs["deepspeed"]]),
                "seconds_by_phase": phases["ours"],
                "peer_seconds_by_phase": phases["deepspeed"],
            },
        )
    ]
