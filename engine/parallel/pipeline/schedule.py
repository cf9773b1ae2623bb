"""Passes of a step's micro-batches through the pieces, by a schedule of `torch.distributed.pipelining`.

What a schedule hands around are the numbers of the micro-batches: each rank has them all, and looks them up.
Memory that runs out in a piece stays there (chunk.py): the schedule goes on with zeros, and whoever runs it is told.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from engine.parallel import dist, dtensors, zero
from engine.parallel.comm_stats import count
from engine.parallel.pipeline.chunk import Chunk
from engine.parallel.pipeline.piece import Piece
from engine.parallel.pipeline.stage import Stage

Kind = Literal["1f1b", "gpipe"]
Guard = Callable[[bool, int, Callable[[], Any]], Any]  # (if it is a forward, number of the micro-batch, what to call)


class Pipeline:
    """The pieces of one model at work; every rank calls, with the same micro-batches on the ranks of one model."""

    def __init__(self, module: nn.Module, piece: Piece, *, kind: Kind, zero_stage: int, dtype: torch.dtype) -> None:
        self.module, self.piece, self.kind = module, piece, kind
        self._zero_stage = zero_stage
        self._stage = Stage(module, piece, dtype)
        self._group = dist.along_pipeline()
        self._ends = dist.ends_of_pipeline()

    def run(
        self, work: Callable[[int], Tensor], rows: Sequence[int], guard: Guard, *, trains: bool, kind: Kind
    ) -> None:
        """`work` on the number of each micro-batch: forward, and where it trains backward from the losses it returns.

        `rows` are the micro-batches' tokens. `guard` calls each part; it gives None for one that failed here, and for
        those that come after that. A step that trained ends with `add_up`, once it is known that no rank failed.
        """
        self._stage.rows, many = max(rows), len(rows)
        passes = _Passes(self._stage, self.piece, work, guard, partial(self._before_backward, many))
        schedule, places = self._schedule(passes, many, kind, trains=trains), torch.arange(many)
        try:
            if self.piece.is_first:
                schedule.step(places, return_outputs=False)
            else:
                schedule.step(place=places, target=places if trains else None, return_outputs=False)
        except RuntimeError as wrapped:
            raise wrapped.__cause__ or wrapped from None
        sent = (not self.piece.is_last) + (trains and not self.piece.is_first)
        count("other", sent * many * self._stage.message().nbytes)

    def add_up(self) -> None:
        """What ends a step's passes. A tied weight's gradient is what it got as embedding, on the first rank, plus as
        head, on the last.
        """
        zero.after_micro_batch(self.module, last=True)
        if self._ends is None:
            return
        for name, parameter in self.module.named_parameters():
            if name in self.piece.tied and parameter.grad is not None:
                dist.all_reduce_sum(dtensors.local(parameter.grad), group=self._ends)

    def from_last(self, value: Any) -> Any:
        """The last rank's object, on every rank."""
        return dist.broadcast_object(value, source=self.piece.size - 1, group=self._group)

    def squared_norm(self) -> float:
        """The sum of the squares of all gradients, the same number on every rank."""
        there = [p.grad for name, p in self.module.named_parameters() if p.grad is not None and not self._again(name)]
        return dist.all_reduce_sum(dtensors.squared_norm(there), group=self._group).item()

    def _again(self, name: str) -> bool:
        """Whether a parameter of this rank is another rank's first of all."""
        return name in self.piece.tied and not self.piece.is_first

    def _schedule(self, passes: "_Passes", many: int, kind: Kind, *, trains: bool) -> ScheduleGPipe | Schedule1F1B:
        """For one step: what a schedule has prepared fits the shape of this step's messages alone."""
        messages, loss = self._stage.message(), torch.empty((), device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.long, device="meta")
        one = PipelineStage(
            passes,
            self.piece.rank,
            self.piece.size,
            dist.world().device,
            group=self._group,
            input_args=number if self.piece.is_first else messages,
            output_args=loss if self.piece.is_last else messages,
        )
        in_turn = kind == "1f1b" and trains and many >= self.piece.size
        made = Schedule1F1B if in_turn else ScheduleGPipe
        return made(one, many, _own if trains else None, scale_grads=False)

    def _before_backward(self, many: int, place: int) -> None:
        zero.before_micro_batch(self.module, stage=self._zero_stage, last=place == many - 1)


class _Passes(nn.Module):
    """What a schedule takes for the rank's module: it gets a micro-batch's number, and on later ranks a message."""

    def __init__(
        self, stage: Stage, piece: Piece, work: Callable[[int], Tensor], guard: Guard, before: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._stage, self._piece, self._work, self._guard, self._before = stage, piece, work, guard, before
        self._chunks: list[Chunk] = []

    def forward(self, inbound: Tensor, place: Tensor | None = None) -> Tensor:
        index = int(inbound if place is None else place)
        chunk = Chunk(partial(self._guarded, index), partial(self._before, index))
        self._chunks.append(chunk)
        form = torch.empty((), device="meta") if self._piece.is_last else self._stage.message()
        received = None if self._piece.is_first else inbound
        return chunk.forward(lambda own: self._stage.run(lambda: self._work(index), own), received, form)

    def _guarded(self, index: int, forward: bool, part: Callable[[], Any]) -> Any:
        found = self._guard(forward, index, part)
        if found is None:
            for chunk in self._chunks:
                chunk.let_go()
        return found


def _own(loss: Tensor, target: Tensor) -> Tensor:
    """The last rank's output is the loss already."""
    return loss
