"""A micro-batch that runs out of memory is halved, and the same optimizer step done again."""

from engine.healing.failure import is_out_of_memory
from engine.healing.healer import Healer, Pass
from engine.healing.portion import Portion

__all__ = ["Healer", "Pass", "Portion", "is_out_of_memory"]
