"""DPO on ragged pairs of 20 to 512 tokens a side, against TRL's DPOTrainer, in bf16 and fp32.

Both sides have the same weights, take the same pairs in the same order, and have read the reference's log-probabilities
before the first step, which is not in the rate. That they do the same work is checked by what each step comes to.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import BenchFailed, in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import Figures, measure
from benchmarks.peers.environments import TRL, environment
from benchmarks.record import Result

PAIRS, STEPS, WARMUP = 8, 1, 1
PRECISIONS = ("bf16", "fp32")
FIGURES = ("loss", "chosen log-probability", "rejected log-probability")
LOG_PROBABILITIES = {"fp32": 1e-5, "bf16": 5e-4}  # relative
FIRST_LOSS = {"fp32": 1e-5, "bf16": 1e-3}  # the policy is the reference, read in rows that were cut otherwise
LOSSES = {"fp32": 1e-4, "bf16": 2e-2}  # after the first step; a lead is the small difference of large sums


def run(rounds: int) -> list[Result]:
    """Pairs a second. Raises BenchFailed where the sides do not do the same work."""
    trl = environment("trl", TRL)
    results = []
    for precision in PRECISIONS:
        told = work.base(
            precision,
            preferences=work.preferences(PAIRS * (STEPS + WARMUP)),
            pairs_a_step=PAIRS,
            micro_rows=4,
            steps=STEPS,
            warmup=WARMUP,
            budget=2048,
            max_length=work.LONGEST,
            beta=0.1,
        )
        found = in_turn(
            {
                "ours": partial(measure, "benchmarks.peers.ours.dpo", told),
                "trl": partial(measure, "benchmarks.peers.theirs.trl_dpo", told, python=trl),
            },
            rounds,
        )
        ours, theirs = found["ours"], found["trl"]
        require_same(ours[0].more["figures"], theirs[0].more["figures"], precision)
        results.append(
            Result(
                bench="peers",
                case=f"dpo-{precision}",
                ours=median([figures.rate for figures in ours]),
                unit="pairs/s",
                lower_is_better=False,
                peer=median([figures.rate for figures in theirs]),
                detail={
                    "peak_gib": median([figures.peak_gib for figures in ours]),
                    "peer_peak_gib": median([figures.peak_gib for figures in theirs]),
                    "run_cpu_seconds_per_second": median([figures.cpu_seconds_per_second for figures in ours]),
                    "reference_seconds": _reference(ours),
                    "peer_reference_seconds": _reference(theirs),
                },
            )
        )
    return results


def _reference(runs: Sequence[Figures]) -> float:
    return median([run.more["reference_seconds"] for run in runs])


def require_same(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], precision: str) -> None:
    """Raises BenchFailed where the `FIGURES` of a step, one row a step, differ by more than rounding."""
    for step, (mine, peer) in enumerate(zip(ours, theirs, strict=True), 1):
        within = LOG_PROBABILITIES[precision]
        loss_within = (FIRST_LOSS if step == 1 else LOSSES)[precision]
        bounds = [loss_within, *(within * abs(value) for value in mine[1:])]
        for name, value, other, bound in zip(FIGURES, mine, peer, bounds, strict=True):
            if not abs(value - other) <= bound:
                raise BenchFailed(f"step {step} in {precision}: our {name} is {value:.7g}, the peer's {other:.7g}")
