"""Training steps beside DeepSpeed at the same ZeRO stage: 2 ranks of one thread, OPT-125M shape, bf16, fp32 masters.

Both get the same tokens, rate and clipping, and train with the loss that is usual with them: the SFT stage's, and the
`labels=` loss of transformers. The first steps of a run pay for warm-up and don't count.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import in_turn, median, spread
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.ranks import run_ranks
from benchmarks.record import Result

RANKS, STEPS, WARM_UP = 2, 6, 2
TOKENS = 4 * 512  # a step, over all ranks: steps.py has them


@dataclass(frozen=True)
class Run:
    """One run of one side: seconds of a step, the peak resident bytes of the rank that needs more, rank 0's losses."""

    seconds: float
    peak_bytes: int
    losses: Sequence[float]


def measure(rounds: int, stage: int) -> Result:
    """Ours and DeepSpeed's tokens a second at a ZeRO stage, in turn."""
    peer = environment("deepspeed", DEEPSPEED)
    sides = {
        "ours": partial(train, Path(sys.executable), "benchmarks.zero.beside_deepspeed.our_steps", stage),
        "peer": partial(train, peer, "benchmarks.zero.beside_deepspeed.their_steps", stage),
    }
    runs = in_turn(sides, rounds)
    rates = {side: [TOKENS / run.seconds for run in found] for side, found in runs.items()}
    gib = {side: median([run.peak_bytes / 2**30 for run in found]) for side, found in runs.items()}
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
            "peak_host_gib_a_rank": gib,
            "runs": rates,
            "spread": {side: spread(found) for side, found in rates.items()},
            "losses": {side: found[-1].losses for side, found in runs.items()},
        },
    )


def train(python: Path, module: str, stage: int) -> Run:
    """One run of one side. Raises BenchFailed."""
    return read(run_ranks(module, [str(stage), str(STEPS)], RANKS, python=python))


def read(ranks: Sequence[Mapping[str, Any]]) -> Run:
    """What came of what the ranks printed."""
    peak = max(int(rank["peak_bytes"]) for rank in ranks)
    return Run(median(ranks[0]["seconds"][WARM_UP:]), peak, ranks[0]["losses"])
