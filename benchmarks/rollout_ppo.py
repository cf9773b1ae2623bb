"""One whole PPO iteration, phase by phase: ours against the same one written with transformers and plain PyTorch.

8 prompts of 128 tokens, 128 new ones, one epoch, four models of OPT-125M's shape; fp32 weights, the same precision of
computing on both sides, each in a process of its own.
"""

from functools import partial

from benchmarks.machine import cpu_precision
from benchmarks.measure import in_turn, median, medians_by_name, spread
from benchmarks.peers import work
from benchmarks.peers.children import measure as child
from benchmarks.peers.ppo import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, STEPS
from benchmarks.record import Result

WARMUP = 2  # the first flips are checked, and pay for memory


def measure(case: str, rounds: int) -> Result:
    """Seconds an iteration."""
    prompts = work.prompts(PROMPTS, PROMPT_TOKENS)
    told = work.base(cpu_precision(), prompts=prompts, new_tokens=NEW_TOKENS, steps=STEPS, warmup=WARMUP, budget=2048)
    sides = {"ours": "benchmarks.peers.ours.ppo", "peer": "benchmarks.peers.theirs.plain_ppo"}
    found = in_turn({side: partial(child, module, told) for side, module in sides.items()}, rounds)
    seconds = {side: [second for figures in runs for second in figures.seconds] for side, runs in found.items()}
    phases = {side: medians_by_name([figures.more["phases"] for figures in runs]) for side, runs in found.items()}
    return Result(
        bench="rollout",
        case=case,
        ours=median(seconds["ours"]),
        unit="s an iteration",
        lower_is_better=True,
        peer=median(seconds["peer"]),
        detail={
            "dtype": cpu_precision(),
            "threads": work.THREADS,
            "seconds_by_phase": phases["ours"],
            "peer_seconds_by_phase": phases["peer"],
            "spread": spread(seconds["ours"]),
            "spread_peer": spread(seconds["peer"]),
        },
    )
