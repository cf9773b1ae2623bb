"""A PPO iteration, 8 prompts of 128 tokens, 128 new ones, one epoch, against TRL 0.19.1's PPOTrainer."""

from functools import partial

from benchmarks.measure import in_turn, median
from benchmarks.peers import work
from benchmarks.peers.children import measure
from benchmarks.peers.environments import TRL_PPO, environment
from benchmarks.record import Result

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, STEPS, WARMUP = 8, 128, 128, 2, 1


def run(rounds: int) -> list[Result]:
    """Seconds an iteration: fp32 weights, bf16 where the peer computes in bf16 (in its training)."""
    trl = environment("trl-ppo", TRL_PPO)
    told = work.base(
        "bf16",
        prompts=work.prompts(PROMPTS, PROMPT_TOKENS),
        new_tokens=NEW_TOKENS,
        steps=STEPS,
        warmup=WARMUP,
        budget=2048,
    )
    found = in_turn(
        {
            "ours": partial(measure, "benchmarks.peers.ours.ppo", told),
            "trl": partial(measure, "benchmarks.peers.theirs.trl_ppo", told, python=trl),
        },
        rounds,
    )
    ours = found["ours"]
    return [
        Result(
            bench="peers",
            case="ppo",
            ours=median([second for figures in ours for second in figures.seconds]),
            unit="s an iteration",
            lower_is_better=True,
            peer=median([second for figures in found["trl"] for second in figures.seconds]),
            detail={
                "dtype": "bf16",
                "peak_gib": median([figures.peak_gib for figures in ours]),
                "peer_peak_gib": median([figures.peak_gib for figures in found["trl"]]),
                "run_cpu_seconds_per_second": median([f.cpu_seconds_per_second for f in ours]),
                "seconds_by_phase": ours[-1].more["phases"],
            },
        )
    ]
