"""Decode steps by recordings, one a number of rows; steps with fewer are filled up with rows that nobody reads.

A size is recorded when it has come up a few times. The first replay runs on other tokens than were recorded, beside the
module, and must give the same logits; else that model decodes through its modules, as it does where it can't be
recorded at all.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.rollout.attention import routed
from engine.rollout.cache.slots import Step
from engine.rollout.on_device.graphs import bucket
from engine.rollout.packed import Forward, PackedLinears
from engine.rollout.recorded.lowering import lower
from engine.rollout.recorded.program import Program
from engine.rollout.recorded.recording import Layer, Recorder, Unrecordable

log = logging.getLogger(__name__)
RECORD_AFTER = 3  # steps of a size
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest logit

Forwards = Callable[[Tensor, Tensor, Step], Tensor]


@dataclass
class _Size:
    """What is known of steps with so many rows."""

    came: int = 0
    program: Program | None = None
    trusted: bool = False
    version: int = -1


class RecordedSteps:
    """Decode steps of one module. `forward` runs it: token ids (1, N), positions (1, N), step -> logits (1, N, V)."""

    def __init__(self, module: nn.Module, packs: PackedLinears, forward: Forwards) -> None:
        self.module, self.packs, self.forward = module, packs, forward
        self.refused: str | None = None  # why the module decodes as it is
        self._sizes: dict[int, _Size] = {}

    @property
    def trusted(self) -> set[int]:
        """The numbers of rows whose recordings were held against the module."""
        return {rows for rows, size in self._sizes.items() if size.trusted}

    def release(self) -> None:
        """Let go of weights and packs; recordings stay."""
        for size in self._sizes.values():
            size.version = -1
            if size.program is not None:
                size.program.unbind()

    def run(self, token_ids: Sequence[int], step: Step) -> Tensor | None:
        """The logits (n, V) after one token of each sequence; None where the module has to be asked."""
        rows = bucket(len(token_ids))
        size = self._sizes.setdefault(rows, _Size())
        size.came += 1
        if self.refused is not None or size.came <= RECORD_AFTER:
            return None
        fill = rows - len(token_ids)
        ids = torch.tensor([[*token_ids, *[0] * fill]], device=step.positions.device)
        positions = torch.nn.functional.pad(step.positions, (0, fill))[None] if fill else step.positions[None]
        logits = self._run(size, rows, ids, positions, step)
        return None if logits is None else logits[0, : len(token_ids)]

    def _run(self, size: _Size, rows: int, ids: Tensor, positions: Tensor, step: Step) -> Tensor | None:
        if size.program is None:
            return self._record(size, rows, ids, positions, step)
        if size.version != self.packs.version:
            size.program.bind()
            size.version = self.packs.version
        if size.trusted:
            logits: Tensor = size.program(ids, positions, step)
            return logits
        return self._check(size, size.program, ids, positions, step)

    def _record(self, size: _Size, rows: int, ids: Tensor, positions: Tensor, step: Step) -> Tensor | None:
        recorder = Recorder(self.module, [ids, positions, step])

        def through(layer: nn.Module, forward: Forward) -> Forward:
            return lambda x: recorder.call(forward, (x,), {}, as_=Layer(layer))

        try:
            with routed(self.module), self.packs.applied(through), recorder.watching():
                logits = self.forward(ids, positions, step)
            size.program = Program(lower(recorder.finish(logits), self.packs, rows))
            size.version = self.packs.version
        except Unrecordable as reason:
            self._refuse(str(reason))
            return None
        return logits

    def _check(self, size: _Size, program: Program, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        with routed(self.module), self.packs.applied():
            right = self.forward(ids, positions, step)
        try:
            replayed = program(ids, positions, step)
        except Exception as problem:  # whatever a call says to other numbers than it was recorded with
            self._refuse(str(problem))
            return right
        off = (replayed.float() - right.float())[0, : len(step.slots)].abs().max()
        size.trusted = bool(off <= TOLERANCE.get(right.dtype, 5e-2) * right.abs().max())
        if not size.trusted:
            self._refuse(f"its calls depend on the tokens: logits differ by {off:.2g}")
        return right

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._sizes.clear()
        log.info("%s decodes through its modules: %s", type(self.module).__name__, reason)
