"""How a step's passes are run, for the healer to try: one micro-batch after another.

Pipelines have a way of their own (engine/pipelined.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine.healing.parts import Notes, Parts, Pass
from engine.healing.portion import Portion
from engine.parallel import dist

T = TypeVar("T")
ADVICE = (
    "Shorter sequences (max_length), engine.activation_checkpointing=true, a higher ZeRO stage, an offload tier "
    "(engine=zero3-offload), rows shared out over ranks (engine.sequence_parallel) or adapters (lora.rank) need less"
)


@dataclass(frozen=True)
class Report:
    """What a rank says of an attempt: the failed micro-batch's size (0: none), if it can be cut, and all sizes."""

    failed: int
    divisible: bool
    reason: str
    sizes: tuple[int, ...]


class Passes(Protocol):
    """A way to take a step's micro-batches through a module, as often as the healer tries.

    `advice` says what needs less memory where nothing can be halved.
    """

    advice: str

    def as_they_are(self, name: str, batches: Sequence[Any], work: Callable[[Any, Pass], T]) -> list[Any]:
        """The results of micro-batches that can't be halved, laid out."""
        ...

    def knows(self, name: str, count: int) -> bool:
        """Whether a rank that fails in such passes knows what is left."""
        ...

    def learn(self, name: str, nothing: Portion[Any], count: int, work: Callable[[Any, Pass], T]) -> str | None:
        """Find it out by passes over nothing; why memory ran out, where it did."""
        ...

    def attempt(
        self, name: str, batches: Sequence[Portion[Any]], work: Callable[[Any, Pass], T], *, again: bool
    ) -> tuple[list[Any], Report]:
        """All passes, or those until one fails and the collectives of the others. `again`: some failed before."""
        ...


class OneByOne:
    """Each micro-batch goes forward and backward before the next does."""

    advice = ADVICE

    def __init__(self) -> None:
        self._notes: Notes | None = {} if dist.world().size > 1 else None

    def as_they_are(self, name: str, batches: Sequence[Any], work: Callable[[Any, Pass], T]) -> list[Any]:
        return [work(batch, _kind(name, place, len(batches))) for place, batch in enumerate(batches)]

    def knows(self, name: str, count: int) -> bool:
        places = range(min(count, 3))
        return self._notes is None or all(_kind(name, place, len(places)) in self._notes for place in places)

    def learn(self, name: str, nothing: Portion[Any], count: int, work: Callable[[Any, Pass], T]) -> str | None:
        _, report = self.attempt(name, [nothing] * min(count, 3), work, again=False)
        return report.reason or None

    def attempt(
        self, name: str, batches: Sequence[Portion[Any]], work: Callable[[Any, Pass], T], *, again: bool
    ) -> tuple[list[Any], Report]:
        parts, kinds = Parts(self._notes), [_kind(name, place, len(batches)) for place in range(len(batches))]
        results = [
            parts.run(kind, place, lambda piece=piece, kind=kind: work(piece.batch, kind))  # type: ignore[misc]
            for place, (piece, kind) in enumerate(zip(batches, kinds, strict=True))
        ]
        return results, report(parts, batches)


def report(parts: Parts, batches: Sequence[Portion[Any]]) -> Report:
    """What this rank says of an attempt over these micro-batches."""
    sizes = tuple(piece.size for piece in batches)
    if parts.failed is None:
        return Report(0, True, "", sizes)
    place, reason = parts.failed
    return Report(sizes[place], batches[place].halves() is not None, reason, sizes)


def _kind(name: str, place: int, count: int) -> Pass:
    return Pass(name, place == 0, place == count - 1)
