"""The parts of an attempt, of which one may run out of memory: forward and backward of a micro-batch, or one of them.

A rank that fails does no more work in the attempt. It takes part with zeros in the collectives that are left of the
part, and in those of the parts that follow, as the notes of earlier passes tell (engine/parallel/replay.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.healing.failure import attempt
from engine.parallel import dist
from engine.parallel.board import of_mates
from engine.parallel.replay import Note

T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """A kind of pass over a micro-batch: all passes of a kind issue the same collectives. `name` tells training from
    scoring; the first and the last micro-batch of a step differ from the others.
    """

    name: str
    first: bool
    last: bool


Notes = dict[Pass, Note]


class Parts:
    """One attempt at all passes of a step.

    `failed` has the place of the micro-batch that ran out of memory on this rank, and what was said.
    """

    def __init__(self, notes: Notes | None) -> None:
        """`notes` are read and written; None where no other rank waits for this one inside of a part."""
        self._notes = notes
        self.failed: tuple[int, str] | None = None

    def run(self, kind: Pass, place: int, part: Callable[[], T]) -> T | None:
        """What a part gives; None where it fails, or an earlier one did."""
        reached = Note()
        if self.failed is None:
            if self._notes is None:
                result, reason = attempt(part)
            else:
                reached = Note(of_mates() if dist.world().mates > 1 else None)
                with reached.taken():
                    result, reason = attempt(part)
            if reason is None:
                reached.over()
                if self._notes is not None:
                    self._notes[kind] = reached
                return result
            self.failed = place, reason
        if self._notes is not None and kind in self._notes:  # else it was to be learnt now, and the run ends
            self._notes[kind].finish(reached)
        return None
