"""SFT on ragged conversations of 20 to 512 tokens, against TRL's SFTTrainer, packed and unpacked, in bf16 and fp32."""

from functools import partial

from benchmarks.measure import in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.peers.environments import TRL, environment
from benchmarks.record import Result

CONVERSATIONS, STEPS, WARMUP = 12, 2, 1


def run(rounds: int) -> list[Result]:
    """Useful tokens a second; the peer's is the better of its two layouts."""
    trl = environment("trl", TRL)
    results = []
    for precision in ("bf16", "fp32"):
        told = work.base(
            precision,
            sequences=work.conversations(CONVERSATIONS * (STEPS + WARMUP)),
            conversations=CONVERSATIONS,
            steps=STEPS,
            warmup=WARMUP,
            budget=2048,
            rows=4,
            micro_rows=4,
            max_length=work.LONGEST,
        )
        theirs = "benchmarks.peers.theirs.trl_sft"
        found = in_turn(
            {
                "ours": partial(measure, "benchmarks.peers.ours.sft", told),
                "packed": partial(measure, theirs, {**told, "layout": "packed"}, python=trl),
                "unpacked": partial(measure, theirs, {**told, "layout": "unpacked"}, python=trl),
            },
            rounds,
        )
        rates = {name: median([figures.rate for figures in runs]) for name, runs in found.items()}
        results.append(
            Result(
                bench="peers",
                case=f"sft-{precision}",
                ours=rates["ours"],
                unit="useful tokens/s",
                lower_is_better=False,
                peer=max(rates["packed"], rates["unpacked"]),
                detail={
                    "peer_packed": rates["packed"],
                    "peer_unpacked": rates["unpacked"],
                    "peak_gib": median([figures.peak_gib for figures in found["ours"]]),
                    "peer_peak_gib": median([figures.peak_gib for figures in found["packed"]]),
                    "run_cpu_seconds_per_second": median([f.cpu_seconds_per_second for f in found["ours"]]),
                },
            )
        )
    return results
