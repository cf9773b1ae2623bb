"""ZeRO-2 beside DeepSpeed's."""

from benchmarks.record import Result
from benchmarks.zero.beside_deepspeed.compare import compare


def measure(rounds: int) -> Result:
    """Tokens a second of training steps."""
    return compare(2, rounds)
