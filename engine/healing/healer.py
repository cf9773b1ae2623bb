"""Passes over micro-batches, healed: where one runs out of memory on any rank, smaller ones make the same sums.

What is healed: memory that runs out in the forward, the loss or the backward of a micro-batch, on any ranks, under any
ZeRO stage. A rank that fails goes through the collectives that are left of its passes with zeros (engine/parallel/
replay.py), at the end all ranks agree, throw gradients and results away, put the random state and the buffers back, cut
every micro-batch that is as large as the failed one, and do all of it again. What can't be cut any more, and what runs
out elsewhere (building the engine, the optimizer's step, a checkpoint), ends with a message that says what to change.
Left out: tensor groups that span hosts, or whose blocks are compiled (their collectives are in compiled code, and are
not noted); there a failure ends the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.healing.failure import attempt
from engine.healing.portion import Portion
from engine.parallel import dist, zero
from engine.parallel.board import of_tensor_group
from engine.parallel.replay import Note

T = TypeVar("T")
Pieces = list[list[Portion[Any]]]  # of each micro-batch, what it was cut into


@dataclass(frozen=True)
class Pass:
    """Which pass of how it is: its collectives depend on no more. `name` tells training from scoring."""

    name: str
    first: bool
    last: bool


@dataclass(frozen=True)
class _Report:
    """What a rank says of an attempt: the failed micro-batch's size (0: none), if it can be cut, and all sizes."""

    failed: int
    divisible: bool
    reason: str
    sizes: tuple[int, ...]


class Healer:
    """Runs the passes of one module.

    `limit` is the size above which micro-batches are cut beforehand, since a larger one did not fit (None: nothing
    failed yet); `times` counts the attempts that were done again.
    """

    def __init__(self, module: nn.Module, discard: Callable[[], None], *, compiled: bool = False) -> None:
        """`discard` throws away what half a step left: gradients, and parameters that were gathered. `compiled` says
        that the module's blocks are.
        """
        self.module, self._discard, self._compiled = module, discard, compiled
        self.limit: int | None = None
        self.times = 0
        self._notes: dict[Pass, Note] = {}

    def run(self, name: str, batches: Sequence[Any], work: Callable[[Any, Pass], T]) -> list[list[T]]:
        """`work` on each micro-batch: for each of them a list, of one result, or one for each piece it was cut into.

        Every rank passes equally many. Only a `Portion` can be cut: where not all are, they run as they are. Raises
        ValueError on every rank where what failed can't be cut.
        """
        if not batches or not all(isinstance(batch, Portion) for batch in batches) or not self._can_heal():
            return [[work(laid_out(batch), _kind(name, at, len(batches)))] for at, batch in enumerate(batches)]
        pieces: Pieces = [[batch] for batch in batches]
        if self.limit is not None:
            pieces = _within(pieces, self.limit)
        before = _State(self.module)
        healed = False
        while True:
            flat = [piece for group in pieces for piece in group]
            self._learn(name, flat, work, before)
            results, report = self._attempt(name, flat, work)
            if dist.max_over_ranks(float(report.failed)) == 0:
                if healed:
                    self._tell()
                return _grouped(results, [len(group) for group in pieces])
            del results
            healed = True
            self._discard()
            before.restore()
            pieces = self._smaller(pieces, dist.gather_objects(report))

    def rehearse(self, batches: Sequence[Any], work: Callable[[Any, Pass], T]) -> None:
        """Run training passes and throw away what comes of them: what fits now fits later, and `limit` is found."""
        before = _State(self.module)
        self.run("train", batches, work)
        self._discard()
        before.restore()

    def _attempt(
        self, name: str, flat: Sequence[Portion[Any]], work: Callable[[Any, Pass], T]
    ) -> tuple[list[T], _Report]:
        """All passes, or those until one fails and the collectives of the others."""
        results: list[T] = []
        sizes = tuple(piece.size for piece in flat)
        for place, piece in enumerate(flat):
            kind = _kind(name, place, len(flat))
            result, reached, reason = self._noted(piece, kind, work)
            if reason is not None:
                results.clear()
                if dist.world().size > 1:
                    self._notes[kind].finish(reached)
                    for later in range(place + 1, len(flat)):
                        self._notes[_kind(name, later, len(flat))].finish(Note())
                return [], _Report(piece.size, piece.halves() is not None, reason, sizes)
            results.append(result)
        return results, _Report(0, True, "", sizes)

    def _noted(self, piece: Portion[Any], kind: Pass, work: Callable[[Any, Pass], T]) -> tuple[Any, Note, str | None]:
        """The result of a pass, the collectives that it got through, and why it failed, where it did."""
        if dist.world().size == 1:
            result, reason = attempt(lambda: work(piece.batch, kind))
            return result, Note(), reason
        note = Note(of_tensor_group() if dist.world().tensor > 1 else None)
        with note.taken():
            result, reason = attempt(lambda: work(piece.batch, kind))
        if reason is None:
            note.over()
            self._notes[kind] = note
        return result, note, reason

    def _can_heal(self) -> bool:
        return dist.world().tensor == 1 or (not self._compiled and of_tensor_group() is not None)

    def _learn(self, name: str, flat: Sequence[Portion[Any]], work: Callable[[Any, Pass], T], before: "_State") -> None:
        """Find out by passes over nothing which collectives the passes to come have, where that is not known yet."""
        count = min(len(flat), 3)
        if dist.world().size == 1 or all(_kind(name, place, count) in self._notes for place in range(count)):
            return
        zero.release(self.module)
        for place in range(count):
            _, _, reason = self._noted(flat[0].nothing(), _kind(name, place, count), work)
            if reason is not None:
                raise ValueError(f"no memory is left for even a pass over nothing ({reason}). {ADVICE}")
        self._discard()
        before.restore()

    def _smaller(self, pieces: Pieces, reports: Sequence[_Report]) -> Pieces:
        """Cut what is as large as the smallest that failed, alike on every rank."""
        failures = [report for report in reports if report.failed]
        for report in failures:
            if not report.divisible:
                raise ValueError(
                    f"out of memory with a micro-batch of one sequence of {report.failed} tokens, which can't be "
                    f"halved ({report.reason}). {ADVICE}"
                )
        failed = min(report.failed for report in failures)
        largest = [max(column) for column in zip(*(report.sizes for report in reports), strict=True)]
        self.times += 1
        smaller = _cut(pieces, [size >= failed for size in largest])
        mine = max(piece.size for group in smaller for piece in group)
        self.limit = min(failed - 1, int(dist.max_over_ranks(mine)))
        return smaller

    def _tell(self) -> None:
        if dist.world().leads:
            print(
                f"memory: it ran out; micro-batches of at most {self.limit} tokens fit, and are used from now on. "
                "The step was done again, with the same result",
                flush=True,
            )


ADVICE = (
    "Shorter sequences (max_length), engine.activation_checkpointing=true, a higher ZeRO stage, an offload tier "
    "(engine=zero3-offload) or adapters (lora.rank) need less"
)


class _State:
    """What a pass changes beside gradients: the random generators, and buffers that training writes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.random = torch.get_rng_state()
        self.device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self.buffers = {name: buffer.clone() for name, buffer in _written(module).items()}

    @torch.no_grad()
    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        for name, buffer in _written(self.module).items():
            buffer.copy_(self.buffers[name])


def _written(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state dict has: running statistics, not what is computed at construction."""
    return {
        f"{path}.{leaf}": buffer
        for path, owner in module.named_modules()
        for leaf, buffer in owner._buffers.items()
        if buffer is not None and leaf not in owner._non_persistent_buffers_set
    }


def laid_out(batch: Any) -> Any:
    """What a pass takes: the micro-batch of a portion, anything else as it is."""
    return batch.batch if isinstance(batch, Portion) else batch


def _kind(name: str, place: int, count: int) -> Pass:
    return Pass(name, place == 0, place == count - 1)


def _cut(pieces: Pieces, chosen: Sequence[bool]) -> Pieces:
    """Halve the chosen of all pieces, counted through; where a rank can't, its second half is a batch of nothing."""
    wanted = iter(chosen)

    def parts(piece: Portion[Any]) -> Sequence[Portion[Any]]:
        return (piece.halves() or (piece, piece.nothing())) if next(wanted) else (piece,)

    return [[part for piece in group for part in parts(piece)] for group in pieces]


def _within(pieces: Pieces, limit: int) -> Pieces:
    """Cut beforehand what is above `limit` on any rank, as far as that goes."""
    while True:
        large = [piece.size > limit and piece.halves() is not None for group in pieces for piece in group]
        chosen = [any(column) for column in zip(*dist.gather_objects(large), strict=True)]
        if not any(chosen):
            return pieces
        pieces = _cut(pieces, chosen)


def _grouped(results: Sequence[T], counts: Sequence[int]) -> list[list[T]]:
    rest = iter(results)
    return [[next(rest) for _ in range(count)] for count in counts]
