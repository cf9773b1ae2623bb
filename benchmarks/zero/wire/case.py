"""How many fewer bytes 8 bits and 1-bit Adam send, and what that does to a loss curve: 2 ranks, bf16, a small model.

Neither depends on the machine's speed. Each variant is compared with the one that it compresses: 8 bits with plain
ZeRO-2, 1-bit Adam with Adam at stage 0.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import median
from benchmarks.ranks import run_ranks
from benchmarks.record import Result

STEPS = 200
BASES = {"gather8": "none", "reduce8": "none", "both": "none", "onebitadam": "adam"}
LAST = 20  # steps whose mean is a curve's end


def measure(rounds: int) -> Result:
    """`both` against none; the rest stands in the detail. The numbers are the same in every round: one is run."""
    runs = {variant: train(variant) for variant in ("none", "gather8", "reduce8", "both", "adam", "onebitadam")}
    fewer = {variant: _bytes(runs[base]) / _bytes(runs[variant]) for variant, base in BASES.items()}
    return Result(
        bench="zero",
        case="wire",
        ours=fewer["both"],
        unit="x fewer bytes",
        lower_is_better=False,
        detail={
            "steps": STEPS,
            "times_fewer_bytes": fewer,
            "bytes_a_step": {variant: run["sent"] for variant, run in runs.items()},
            "end_of_curve": {variant: _end(run["losses"]) for variant, run in runs.items()},
            "median_deviation": {v: deviation(runs[v]["losses"], runs[base]["losses"]) for v, base in BASES.items()},
            "curves": {variant: run["losses"][:: STEPS // 20] for variant, run in runs.items()},
        },
    )


def train(variant: str) -> Mapping[str, Any]:
    """Rank 0's losses and bytes."""
    first, _ = run_ranks("benchmarks.zero.wire.train", [variant, str(STEPS)], 2)
    print(f"{variant}: {_end(first['losses']):.4f}", file=sys.stderr, flush=True)
    return first


def deviation(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The median over steps of how far a curve is from another, as a share of it."""
    return median([abs(a - b) / b for a, b in zip(losses, plain, strict=True)])


def _end(losses: Sequence[float]) -> float:
    return sum(losses[-LAST:]) / LAST


def _bytes(run: Mapping[str, Any]) -> int:
    return int(run["sent"]["gather"]) + int(run["sent"]["reduce"])
