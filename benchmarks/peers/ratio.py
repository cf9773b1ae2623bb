"""Spread of a rollout's first ratios around 1 in bf16, against log-probabilities of bf16 logits of padded rows."""

from functools import partial

from benchmarks.measure import in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.record import Result

ANSWERS = 16


def run(rounds: int) -> list[Result]:
    """Root mean square of ratio - 1 over response tokens."""
    lengths = [work.tails(ANSWERS, shortest=20, longest=128, median=50.0, seed=seed) for seed in (11, 12)]
    # Weights four times as large as a new model's: logits of several units, as a trained model has.
    told = work.base(
        "bf16",
        prompts=work.sequences(lengths[0], seed=13),
        responses=work.sequences(lengths[1], seed=14),
        max_length=256,
    )
    told["shape"] |= {"init_std": 0.08}
    module = "benchmarks.peers.ours.ratio"
    found = in_turn({side: partial(measure, module, {**told, "layout": side}) for side in ("ours", "plain")}, rounds)
    spreads = {side: median([run.more["deviation"] for run in runs]) for side, runs in found.items()}
    largest = {side: median([run.more["largest"] for run in runs]) for side, runs in found.items()}
    return [
        Result(
            bench="peers",
            case="ratio",
            ours=spreads["ours"],
            unit="rms of ratio - 1",
            lower_is_better=True,
            peer=spreads["plain"],
            detail={"dtype": "bf16", "largest": largest["ours"], "peer_largest": largest["plain"]},
        )
    ]
