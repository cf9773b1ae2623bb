"""A reward model on ragged pairs of 20 to 512 tokens a side, against TRL's RewardTrainer, in bf16 and fp32."""

from functools import partial

from benchmarks.measure import in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.peers.environments import TRL, environment
from benchmarks.record import Result

PAIRS, STEPS, WARMUP = 8, 3, 1


def run(rounds: int) -> list[Result]:
    """Pairs a second."""
    trl = environment("trl", TRL)
    results = []
    for precision in ("bf16", "fp32"):
        told = work.base(
            precision,
            pairs=work.pairs(PAIRS * (STEPS + WARMUP)),
            pairs_a_step=PAIRS,
            micro_rows=4,
            steps=STEPS,
            warmup=WARMUP,
            budget=2048,
            max_length=work.LONGEST,
        )
        found = in_turn(
            {
                "ours": partial(measure, "benchmarks.peers.ours.reward", told),
                "trl": partial(measure, "benchmarks.peers.theirs.trl_reward", told, python=trl),
            },
            rounds,
        )
        results.append(
            Result(
                bench="peers",
                case=f"reward-{precision}",
                ours=median([figures.rate for figures in found["ours"]]),
                unit="pairs/s",
                lower_is_better=False,
                peer=median([figures.rate for figures in found["trl"]]),
                detail={
                    "peak_gib": median([figures.peak_gib for figures in found["ours"]]),
                    "peer_peak_gib": median([figures.peak_gib for figures in found["trl"]]),
                    "run_cpu_seconds_per_second": median([f.cpu_seconds_per_second for f in found["ours"]]),
                },
            )
        )
    return results
