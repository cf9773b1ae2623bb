"""A step's micro-batches on their way through a pipeline: enough of them, how large they are, and memory that runs out.

What healing does one micro-batch after another (engine/healing/passes.py) it does here with all of a step's: forwards
and backwards of several are under way at once. A rank that runs out of memory sends zeros to its neighbours from then
on, and takes part in the collectives of the ranks that hold the same piece; no message is left out, so the schedule
comes to its end on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.figures import detached
from engine.healing import Parts, Pass, Portion, Report, report
from engine.healing.parts import Notes
from engine.ledger import Ledger
from engine.parallel import dist
from engine.parallel.pipeline import Guard, Pipeline

T = TypeVar("T")
Learned = tuple[Tensor, dict[str, float | Tensor]]
Work = Callable[[Any, Pass], tuple[Tensor, T]]  # what backward begins with, and the result


class Pipelined:
    """How the healer runs the passes of a pipeline (engine/healing/passes.py). Results are on the last rank."""

    advice = "Shorter sequences (max_length), activation_checkpointing or more ranks in the pipeline need less"

    def __init__(self, pipeline: Pipeline, ledger: Ledger) -> None:
        self.pipeline, self._ledger = pipeline, ledger
        # Inside of a pass only ranks that hold the same piece wait for each other.
        self._notes: Notes | None = {} if dist.world().data_size > 1 else None

    def enough(self, batches: Sequence[Any]) -> Sequence[Any]:
        """At least as many micro-batches as ranks, where they can be cut: each into as many, alike on all ranks."""
        while 0 < len(batches) < self.pipeline.piece.size and all(isinstance(batch, Portion) for batch in batches):
            batches = [part for batch in batches for part in batch.halves() or (batch, batch.nothing())]
        return batches

    def learning(self, loss_fn: Callable[[nn.Module, Any], Learned], factor: float) -> Work[Learned]:
        """Work whose gradients are those of `factor` times a loss."""

        def work(batch: Any, _: Pass) -> tuple[Tensor, Learned]:
            loss_sum, metrics = loss_fn(self.pipeline.module, batch)
            return loss_sum * factor, (loss_sum.detach(), detached(metrics))

        return work

    def scoring(self, score: Callable[[nn.Module, Any], T]) -> Work[T]:
        """Work without gradients."""
        return lambda batch, _: (torch.zeros((), device=dist.world().device), score(self.pipeline.module, batch))

    def as_they_are(self, name: str, batches: Sequence[Any], work: Callable[[Any, Pass], Any]) -> list[Any]:
        return self._pass(name, batches, [_ids(batch).numel() for batch in batches], work, lambda _, __, part: part())

    def knows(self, name: str, count: int) -> bool:
        return self._notes is None or Pass(f"{name} forward", True, False) in self._notes

    def learn(self, name: str, nothing: Portion[Any], count: int, work: Callable[[Any, Pass], Any]) -> str | None:
        _, found = self.attempt(name, [nothing] * max(2, self.pipeline.piece.size), work, again=False)
        return found.reason or None

    def attempt(
        self, name: str, batches: Sequence[Portion[Any]], work: Callable[[Any, Pass], Any], *, again: bool
    ) -> tuple[list[Any], Report]:
        """`again`: one forward, one backward in turn, whatever is configured. With all forwards first, halves would be
        kept as long as the whole.
        """
        parts, last = Parts(self._notes), len(batches) - 1

        def guard(forward: bool, place: int, part: Callable[[], Any]) -> Any:
            kind = Pass(f"{name} forward", place == 0, last=False)
            if not forward:
                kind = Pass(f"{name} backward", first=False, last=place == last)
            return parts.run(kind, place, part)

        sizes = [batch.size for batch in batches]
        results = self._pass(name, [batch.batch for batch in batches], sizes, work, guard, in_turn=again)
        return results, report(parts, batches)

    def _pass(
        self,
        name: str,
        batches: Sequence[Any],
        rows: Sequence[int],
        work: Callable[[Any, Pass], Any],
        guard: Guard,
        *,
        in_turn: bool = False,
    ) -> list[Any]:
        results: list[Any] = [None] * len(batches)
        trains = torch.is_grad_enabled()
        under_way = self._ledger.under_way(trains=trains)

        def one(place: int) -> Tensor:
            with under_way.forward():
                loss, results[place] = work(batches[place], Pass(name, place == 0, place == len(batches) - 1))
            return loss

        def guarded(forward: bool, place: int, part: Callable[[], Any]) -> Any:
            if not forward:
                under_way.height()
            found = guard(forward, place, part)
            if found is None:
                under_way.forget()
            return found

        self.pipeline.run(one, rows, guarded, trains=trains, kind="1f1b" if in_turn else self.pipeline.kind)
        return results


def _ids(batch: Any) -> Tensor:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", batch)
    if not isinstance(ids, Tensor):
        raise ValueError("pipeline_parallel has to know a micro-batch's tokens: a tensor of ids, or input_ids in it")
    return ids
