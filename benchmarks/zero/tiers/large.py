"""OPT shapes whose model states do not fit a small machine: peak resident memory of SFT steps, optimizer in files."""

from benchmarks.measure import median
from benchmarks.ranks import run_ranks
from benchmarks.record import Result

STEPS, LENGTH, THREADS = 2, 512, 2


def measure(rounds: int, case: str, model: str, at_most_gib: float) -> Result:
    """Once, whatever the rounds: memory does not scatter. `at_most_gib` is the peak that was asked for."""
    (found,) = run_ranks("benchmarks.zero.tiers.large_steps", [model, str(STEPS), str(LENGTH)], 1, threads=THREADS)
    states = 16 * found["parameters"]
    return Result(
        bench="zero",
        case=case,
        ours=found["peak_bytes"] / 2**30,
        unit="GiB peak resident",
        lower_is_better=True,
        detail={
            "at_most": at_most_gib,
            "parameters": found["parameters"],
            "model_states_gib": states / 2**30,
            "nvme_gib": found["nvme_bytes"] / 2**30,
            "build_seconds": found["build_seconds"],
            "step_seconds": found["step_seconds"],
            "tokens_per_second": LENGTH / median(found["step_seconds"]),
            "losses": found["losses"],
        },
    )
