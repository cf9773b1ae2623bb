"""Peak memory of log-probabilities, forward and backward: 4,096 tokens, vocabulary 151,936, against logits in fp32."""

from functools import partial

from benchmarks.measure import in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.record import Result

TOKENS, VOCABULARY, HIDDEN = 4096, 151_936, 1024


def run(rounds: int) -> list[Result]:
    """GiB above the inputs; both gradients are part of it."""
    told = work.base("bf16", tokens=TOKENS, vocabulary=VOCABULARY, hidden=HIDDEN)
    module = "benchmarks.peers.ours.logprob_memory"
    found = in_turn({side: partial(measure, module, {**told, "layout": side}) for side in ("ours", "plain")}, rounds)
    gib = {side: median([run.more["above_inputs"] / 2**30 for run in runs]) for side, runs in found.items()}
    seconds = {side: median([run.seconds[0] for run in runs]) for side, runs in found.items()}
    return [
        Result(
            bench="peers",
            case="logprob_memory",
            ours=gib["ours"],
            unit="GiB above inputs",
            lower_is_better=True,
            peer=gib["plain"],
            detail={"dtype": "bf16", "seconds": seconds["ours"], "peer_seconds": seconds["plain"]},
        )
    ]
