"""What a sequence group of 2 ranks takes for one long row, beside data parallel ranks on the same rows: bytes, seconds.

The same two rows a step, bf16, ZeRO-3: a row each, or both rows one after another on both ranks. Activations are what
the memory tracker counts in the largest micro-batch, and depend on no machine.
"""

from benchmarks.measure import median, spread
from benchmarks.ranks import run_ranks
from benchmarks.record import Result


def measure(rounds: int) -> Result:
    """Seconds a step of the sequence group against data parallel ranks; bytes stand in the detail."""
    ranks = run_ranks("benchmarks.zero.sequence.steps", [str(rounds)], 2)
    seconds = {
        name: [max(each) for each in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]
        for name in ("shared", "apart")
    }
    held = {name: max(rank[name]["activations"] for rank in ranks) for name in ("shared", "apart")}
    sent = {name: max(rank[name]["sent"] for rank in ranks) for name in ("shared", "apart")}
    return Result(
        bench="zero",
        case="sequence",
        ours=median(seconds["shared"]),
        peer=median(seconds["apart"]),
        unit="s/step",
        lower_is_better=True,
        detail={
            "peer": "data parallel",
            "tokens_a_row": ranks[0]["tokens"],
            "activations_MB": {name: size / 1e6 for name, size in held.items()},
            "MB_sent_a_step": {name: size / 1e6 for name, size in sent.items()},
            "spread": {name: spread(values) for name, values in seconds.items()},
        },
    )
