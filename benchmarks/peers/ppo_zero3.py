"""A PPO iteration on 2 ranks, ZeRO-3, against the same on DeepSpeed ZeRO-3 with transformers' `generate`."""

from functools import partial

from benchmarks.measure import in_turn, median, medians_by_name
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.peers.ppo import NEW_TOKENS, PROMPT_TOKENS, PROMPTS
from benchmarks.record import Result

RANKS, STEPS, WARMUP = 2, 1, 1


def run(rounds: int) -> list[Result]:
    """Seconds an iteration, one thread a rank."""
    python = environment("deepspeed", DEEPSPEED)
    prompts = work.prompts(PROMPTS, PROMPT_TOKENS)
    told = work.base("bf16", prompts=prompts, new_tokens=NEW_TOKENS, steps=STEPS, warmup=WARMUP, budget=2048)
    told |= {"threads": 1, "zero_stage": 3}
    sides = {
        "ours": partial(measure, "benchmarks.peers.ours.ppo", told, ranks=RANKS),
        "deepspeed": partial(measure, "benchmarks.peers.theirs.deepspeed_ppo", told, python=python, ranks=RANKS),
    }
    found = in_turn(sides, rounds)
    seconds = {side: median([s for run in runs for s in run.seconds]) for side, runs in found.items()}
    phases = {side: medians_by_name([run.more["phases"] for run in runs]) for side, runs in found.items()}
    return [
        Result(
            bench="peers",
            case="ppo_zero3",
            ours=seconds["ours"],
            unit="s an iteration",
            lower_is_better=True,
            peer=seconds["deepspeed"],
            detail={
                "dtype": "bf16",
                "ranks": RANKS,
                "peak_gib_a_rank": median([run.peak_gib for run in found["ours"]]),
                "peer_peak_gib_a_rank": median([run.peak_gib for run in found["deepspeed"]]),
                "seconds_by_phase": phases["ours"],
                "peer_seconds_by_phase": phases["deepspeed"],
            },
        )
    ]
