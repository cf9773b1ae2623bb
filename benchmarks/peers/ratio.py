"""Spread of a rollout's first ratios around 1 in bf16, against PPO written plainly on a bf16 model.

The ratio of a first minibatch, whose policy has not moved, is 1 but for rounding. What rounds differently decides:
which program the old log-probabilities are from (the generator, or the trainer's own forward), and whether logits are
bf16. `ours` and `peer` are the ratios that either side's update sees: ours takes old log-probabilities from the
trainer's forward, the plain way from the generator's scores. The detail has both sides both ways.
"""

import math
from collections.abc import Sequence
from functools import partial

from benchmarks.measure import in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.record import Result

ANSWERS, NEW_TOKENS, PARTS = 16, 128, 4
CHILDREN = {"ours": "benchmarks.peers.ours.ratio", "plain": "benchmarks.peers.theirs.plain_ratio"}


def run(rounds: int) -> list[Result]:
    """Root mean square of ratio - 1 over response tokens."""
    prompts = work.sequences(work.tails(ANSWERS, shortest=20, longest=128, median=50.0, seed=11), seed=13)
    told = work.base("bf16", prompts=prompts, new_tokens=NEW_TOKENS, parts=PARTS, max_length=256)
    told["shape"] |= {"init_std": 0.08}  # four times a new model's: logits of several units, as a trained model has
    found = in_turn({side: partial(measure, module, told) for side, module in CHILDREN.items()}, rounds)
    spreads = {
        (side, way): median([spread(run.more[way]) for run in runs])
        for side, runs in found.items()
        for way in ("first", "generator")
    }
    return [
        Result(
            bench="peers",
            case="ratio",
            ours=spreads["ours", "first"],
            unit="rms of ratio - 1",
            lower_is_better=True,
            peer=spreads["plain", "generator"],
            detail={
                "dtype": "bf16",
                "against_generator": spreads["ours", "generator"],
                "peer_against_forward": spreads["plain", "first"],
            },
        )
    ]


def spread(logs: Sequence[float]) -> float:
    """Root mean square of ratio - 1, from log-ratios."""
    return math.sqrt(sum(math.expm1(x) ** 2 for x in logs) / len(logs))
