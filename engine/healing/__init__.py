"""A micro-batch that runs out of memory is halved, and the same optimizer step done again."""

from engine.healing.failure import is_out_of_memory
from engine.healing.healer import Healer, State
from engine.healing.parts import Parts, Pass
from engine.healing.passes import OneByOne, Report, report
from engine.healing.portion import Portion

__all__ = ["Healer", "OneByOne", "Parts", "Pass", "Portion", "Report", "State", "is_out_of_memory", "report"]
