"""OPT-2.7B: runs on a machine of 24 GiB."""

from benchmarks.record import Result
from benchmarks.zero.tiers.large import measure_model


def measure(rounds: int) -> Result:
    """Once, whatever the rounds: memory does not scatter."""
    return measure_model("opt_3b", "opt-2.7b", 24.0)
