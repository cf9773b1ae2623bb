"""Training steps beside DeepSpeed at the same ZeRO stage: 2 ranks of one thread, OPT-125M shape, bf16, fp32 masters.

Both get the same tokens, rate and clipping, and train with the loss that is usual with them: the SFT stage's, and the
`labels=` loss of transformers. The first steps of a run pay for warm-up and don't count.
"""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import BenchFailed, in_turn, median, run_command, spread
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.record import ROOT, Result

RANKS, STEPS, WARM_UP = 2, 6, 2
TOKENS = 4 * 512  # a step, over all ranks: steps.py has them
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Run:
    """One run of one side: seconds of a step, the peak resident bytes of the rank that needs more, rank 0's losses."""

    seconds: float
    peak_bytes: int
    losses: Sequence[float]


def compare(stage: int, rounds: int) -> Result:
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
    """Run `module STAGE STEPS` on RANKS ranks and read what they print. Raises BenchFailed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-addr=127.0.0.1"]
    words = ["env", "DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1", str(python), *launch, f"--master-port={port}"]
    done = run_command([*words, "-m", module, str(stage), str(STEPS)], folder=ROOT, limit=LIMIT_SECONDS)
    return read(done.output)


def read(output: str) -> Run:
    """What the ranks printed, one JSON object each. Raises BenchFailed where one is missing."""
    ranks: list[Mapping[str, list[float]]] = [json.loads(line) for line in output.splitlines() if line[:1] == "{"]
    if len(ranks) != RANKS:
        raise BenchFailed(f"{len(ranks)} of {RANKS} ranks left figures:\n{output[-2000:]}")
    peak = max(int(rank["peak_bytes"]) for rank in ranks)  # type: ignore[call-overload]
    return Run(median(ranks[0]["seconds"][WARM_UP:]), peak, ranks[0]["losses"])
