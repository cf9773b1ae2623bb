"""Passes over micro-batches, healed: where one runs out of memory on any rank, smaller ones make the same sums.

What is healed: memory that runs out in the forward, the loss or the backward of a micro-batch, on any ranks, under any
ZeRO stage. A rank that fails goes through the collectives that are left of its passes with zeros (engine/parallel/
replay.py), at the end all ranks agree, throw gradients and results away, put the random state and the buffers back, cut
every micro-batch that is as large as the failed one, and do all of it again. What can't be cut any more, and what runs
out elsewhere (building the engine, the optimizer's step, a checkpoint), ends with a message that says what to change.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from engine.full_parameters import persistent_buffers
from engine.healing.parts import Pass
from engine.healing.passes import OneByOne, Passes, Report
from engine.healing.portion import Portion
from engine.parallel import dist, zero

T = TypeVar("T")
Pieces = list[list[Portion[Any]]]  # of each micro-batch, what it was cut into


class Healer:
    """Runs the passes of one module.

    `limit` is the size above which micro-batches are cut beforehand, since a larger one did not fit (None: nothing
    failed yet); `times` counts the attempts that were done again.
    """

    def __init__(self, module: nn.Module, discard: Callable[[], None], passes: Passes | None = None) -> None:
        """`discard` throws away what half a step left: gradients, and parameters that were gathered. `passes` run a
        step, by default one micro-batch after another.
        """
        self.module, self._discard = module, discard
        self._passes: Passes = passes or OneByOne()
        self.limit: int | None = None
        self.times = 0

    def run(self, name: str, batches: Sequence[Any], work: Callable[[Any, Pass], T]) -> list[list[T]]:
        """`work` on each micro-batch: for each of them a list, of one result, or one for each piece it was cut into.

        Every rank passes equally many. Only a `Portion` can be cut: where not all are, they run as they are. Of a
        pipeline the last rank has the results; the others get None. Raises ValueError on every rank where what failed
        can't be cut.
        """
        if not batches or not all(isinstance(batch, Portion) for batch in batches):
            return [[result] for result in self._passes.as_they_are(name, [laid_out(each) for each in batches], work)]
        pieces: Pieces = [[batch] for batch in batches]
        if self.limit is not None:
            pieces = _within(pieces, self.limit)
        before = State(self.module)
        healed = False
        while True:
            flat = [piece for group in pieces for piece in group]
            self._learn(name, flat, work, before)
            results, report = self._passes.attempt(name, flat, work, again=self.limit is not None or healed)
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
        before = State(self.module)
        self.run("train", batches, work)
        self._discard()
        before.restore()

    def _learn(self, name: str, flat: Sequence[Portion[Any]], work: Callable[[Any, Pass], T], before: "State") -> None:
        """Find out by passes over nothing which collectives the passes to come have, where that is not known yet."""
        if self._passes.knows(name, len(flat)):
            return
        zero.release(self.module)
        reason = self._passes.learn(name, flat[0].nothing(), len(flat), work)
        if reason is not None:
            raise ValueError(f"no memory is left for even a pass over nothing ({reason}). {self._passes.advice}")
        self._discard()
        before.restore()

    def _smaller(self, pieces: Pieces, reports: Sequence[Report]) -> Pieces:
        """Cut what is as large as the smallest that failed, alike on every rank."""
        failures = [report for report in reports if report.failed]
        for report in failures:
            if not report.divisible:
                raise ValueError(
                    f"out of memory with a micro-batch of one sequence of {report.failed} tokens, which can't be "
                    f"halved ({report.reason}). {self._passes.advice}"
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


class State:
    """What a pass changes beside gradients: the random generators, and buffers that training writes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.random = torch.get_rng_state()
        self.device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self.buffers = {name: buffer.clone() for name, buffer in persistent_buffers(module).items()}

    @torch.no_grad()
    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        for name, buffer in persistent_buffers(self.module).items():
            buffer.copy_(self.buffers[name])


def laid_out(batch: Any) -> Any:
    """What a pass takes: the micro-batch of a portion, anything else as it is."""
    return batch.batch if isinstance(batch, Portion) else batch


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
