"""OPT-1.3B: at most 10 GiB resident."""

from benchmarks.record import Result
from benchmarks.zero.tiers.large import measure_model


def measure(rounds: int) -> Result:
    """Once, whatever the rounds: memory does not scatter."""
    return measure_model("opt_1b", "opt-1.3b", 10.0)
