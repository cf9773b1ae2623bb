"""Passes of a step's micro-batches through the pieces, by a schedule of `torch.distributed.pipelining`.

What a schedule hands around are the numbers of the micro-batches: each rank has them all, and looks them up.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from engine.parallel import dist, dtensors, zero
from engine.parallel.pipeline.piece import Piece
from engine.parallel.pipeline.stage import Stage
from engine.parallel.traffic import count

Kind = Literal["1f1b", "gpipe"]
Learned = tuple[Tensor, dict[str, float | Tensor]]


class Pipeline:
    """The pieces of one model at work; every rank calls, with the same micro-batches on the ranks of one model."""

    def __init__(self, module: nn.Module, piece: Piece, *, kind: Kind, zero_stage: int, dtype: torch.dtype) -> None:
        self.module, self.piece = module, piece
        self._kind, self._zero_stage = kind, zero_stage
        self._stage = Stage(module, piece, dtype)
        self._group = dist.along_pipeline()
        self._ends = dist.ends_of_pipeline()

    def train(
        self, batches: Sequence[Any], rows: Sequence[int], loss_fn: Callable[[nn.Module, Any], Learned], factor: float
    ) -> list[Learned]:
        """Forward and backward of all micro-batches: the gradients of `factor` times the sum of their losses.

        `rows` are the micro-batches' tokens. The losses and metrics, on the last rank; nothing on the others.
        """
        learned: list[Learned] = []

        def work(place: int) -> Tensor:
            loss_sum, metrics = loss_fn(self.module, batches[place])
            kept = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
            learned.append((loss_sum.detach(), kept))
            return loss_sum * factor

        self._run(work, rows, trains=True)
        zero.after_micro_batch(self.module, last=True)
        self._add_up_tied()
        return learned

    def score(self, batches: Sequence[Any], rows: Sequence[int], work: Callable[[nn.Module, Any], Any]) -> list[Any]:
        """What `work` gives of each micro-batch, on every rank."""
        found: list[Any] = []

        def score_one(place: int) -> Tensor:
            found.append(work(self.module, batches[place]))
            return torch.zeros((), device=dist.world().device)

        if batches:
            self._run(score_one, rows, trains=False)
        told: list[Any] = self.from_last(found)
        return told

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

    def _add_up_tied(self) -> None:
        """A tied weight's gradient is what it got as embedding, on the first rank, plus as head, on the last."""
        if self._ends is None:
            return
        for name, parameter in self.module.named_parameters():
            if name in self.piece.tied and parameter.grad is not None:
                dist.all_reduce_sum(dtensors.local(parameter.grad), group=self._ends)

    def _run(self, work: Callable[[int], Any], rows: Sequence[int], *, trains: bool) -> None:
        self._stage.rows, many = max(rows), len(rows)
        passes = _Passes(self._stage, self.piece, work, self._before_backward(many) if trains else None)
        schedule, places = self._schedule(passes, many, trains=trains), torch.arange(many)
        try:
            if self.piece.is_first:
                schedule.step(places, return_outputs=False)
            else:
                schedule.step(place=places, target=places if trains else None, return_outputs=False)
        except RuntimeError as wrapped:
            raise wrapped.__cause__ or wrapped from None
        sent = (not self.piece.is_last) + (trains and not self.piece.is_first)
        count("other", sent * many * self._stage.message().nbytes)

    def _schedule(self, passes: "_Passes", many: int, *, trains: bool) -> ScheduleGPipe | Schedule1F1B:
        """For one step: what a schedule has prepared fits the shape of this step's messages alone."""
        messages, loss = self._stage.message(), torch.empty((), device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.long, device="meta")
        one = PipelineStage(
            passes, self.piece.rank, self.piece.size, dist.world().device, group=self._group,
            input_args=number if self.piece.is_first else messages,
            output_args=loss if self.piece.is_last else messages,
        )  # fmt: skip
        in_turn = self._kind == "1f1b" and trains and many >= self.piece.size
        kind = Schedule1F1B if in_turn else ScheduleGPipe
        return kind(one, many, _own if trains else None, scale_grads=False)

    def _before_backward(self, many: int) -> Callable[[int], None]:
        def prepare(place: int) -> None:
            zero.before_micro_batch(self.module, stage=self._zero_stage, last=place == many - 1)

        return prepare


class _Passes(nn.Module):
    """What a schedule takes for the rank's module: it gets a micro-batch's number, and on later ranks a message."""

    def __init__(
        self, stage: Stage, piece: Piece, work: Callable[[int], Any], before: Callable[[int], None] | None
    ) -> None:
        super().__init__()
        self._stage, self._piece, self._work, self._before = stage, piece, work, before

    def forward(self, inbound: Tensor, place: Tensor | None = None) -> Tensor:
        index = int(inbound if place is None else place)
        received = None if self._piece.is_first else inbound
        output: Tensor = self._stage.run(lambda: self._work(index), received)
        if self._before is not None:
            before = self._before
            output.register_hook(lambda gradient: before(index))  # the first that happens in its backward
        return output


def _own(loss: Tensor, target: Tensor) -> Tensor:
    """The last rank's output is the loss already."""
    return loss
