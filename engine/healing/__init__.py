"""A micro-batch that runs out of memory is halved, and the same optimizer step done again."""

from engine.healing.divisible import Divisible
from engine.healing.failure import is_out_of_memory
from engine.healing.healer import Healer, Pass

__all__ = ["Divisible", "Healer", "Pass", "is_out_of_memory"]
