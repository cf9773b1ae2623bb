"""One PPO iteration by phase, against the same iteration in transformers and plain PyTorch.

8 prompts of 128 tokens, 128 new tokens each, one epoch, four models of OPT-125M's shape. Both sides have fp32 weights
and the same compute precision. Each runs in a process of its own.
"""

from functools import partial

from benchmarks.machine import cpu_precision
from benchmarks.measure import in_turn, median, medians_by_name, spread
from benchmarks.peers import tasks
from benchmarks.peers.child_process import measure as measure_child
from benchmarks.peers.ppo import make_task
from benchmarks.record import Result

STEPS, WARMUP = 2, 2  # the first flips include parity checks and allocations


def measure(case: str, rounds: int) -> Result:
    """Return seconds per iteration."""
    task = make_task(cpu_precision(), steps=STEPS, warmup=WARMUP)
    sides = {"ours": "benchmarks.peers.ppo", "peer": "benchmarks.peers.baselines.plain_ppo"}
    results = in_turn({side: partial(measure_child, module, task) for side, module in sides.items()}, rounds)
    seconds = {side: [second for figures in runs for second in figures.seconds] for side, runs in results.items()}
    phases = {side: medians_by_name([figures.more["phases"] for figures in runs]) for side, runs in results.items()}
    return Result(
        bench="rollout",
        case=case,
        ours=median(seconds["ours"]),
        unit="s an iteration",
        lower_is_better=True,
        peer=median(seconds["peer"]),
        detail={
            "dtype": cpu_precision(),
            "threads": tasks.THREADS,
            "seconds_by_phase": phases["ours"],
            "peer_seconds_by_phase": phases["peer"],
            "spread": spread(seconds["ours"]),
            "spread_peer": spread(seconds["peer"]),
        },
    )
