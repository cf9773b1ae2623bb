"""Decode steps by recordings, one a number of rows; steps with fewer are filled up with rows that nobody reads.

A size is recorded when it first comes up, on other tokens than the step has; the step itself is then replayed beside
the module, and must give the same logits. Else that model decodes through its modules, as it does where it can't be
recorded at all. So which way a step is computed does not depend on what was decoded before it: replay and modules may
round differently, and a run that is stopped and goes on has to end like one that was left alone.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.generation.attention import routed
from engine.generation.buckets import bucket
from engine.generation.cache.slots import Step
from engine.generation.packed import PackedLinears
from engine.generation.recorded.making import recorded, unlike
from engine.generation.recorded.program import Program
from engine.generation.recorded.recording import Unrecordable

log = logging.getLogger(__name__)

Forwards = Callable[[Tensor, Tensor, Step], Tensor]


@dataclass
class _Ready:
    """A recording that was held against the module, and the version of the packs that it is bound to."""

    program: Program
    version: int


class RecordedSteps:
    """Decode steps of one module. `forward` runs it: token ids (1, N), positions (1, N), step -> logits (1, N, V)."""

    def __init__(self, module: nn.Module, packs: PackedLinears, forward: Forwards) -> None:
        self.module, self.packs, self.forward = module, packs, forward
        self.refused: str | None = None  # why the module decodes as it is
        self._ready: dict[int, _Ready] = {}  # by the number of rows

    @property
    def trusted(self) -> set[int]:
        """The numbers of rows whose recordings were held against the module."""
        return set(self._ready)

    def release(self) -> None:
        """Let go of weights and packs; recordings stay."""
        for ready in self._ready.values():
            ready.version = -1
            ready.program.unbind()

    def run(self, token_ids: Sequence[int], step: Step) -> Tensor | None:
        """The logits (n, V) after one token of each sequence; None where the module has to be asked."""
        if self.refused is not None:
            return None
        rows = bucket(len(token_ids))
        fill = rows - len(token_ids)
        ids = torch.tensor([[*token_ids, *[0] * fill]], device=step.positions.device)
        positions = torch.nn.functional.pad(step.positions, (0, fill))[None] if fill else step.positions[None]
        ready = self._ready.get(rows)
        if ready is None:
            logits = self._first(rows, ids, positions, step)
            return None if logits is None else logits[0, : len(token_ids)]
        if ready.version != self.packs.version:
            ready.program.bind()
            ready.version = self.packs.version
        replayed: Tensor = ready.program(ids, positions, step)
        return replayed[0, : len(token_ids)]

    def _first(self, rows: int, ids: Tensor, positions: Tensor, step: Step) -> Tensor | None:
        """Record on other tokens, whose keys and values the step's own then overwrite; replay beside the module."""
        vocabulary = self.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
        program = self._record(rows, (ids + 1) % vocabulary, positions, step)
        if program is None:
            return None
        with routed(self.module), self.packs.applied():
            right = self.forward(ids, positions, step)
        try:
            replayed: Tensor = program(ids, positions, step)
        except Exception as problem:  # whatever a call says to other numbers than it was recorded with
            self._refuse(str(problem))
            return None
        if not self._agree(right[0, : len(step.slots)], replayed[0, : len(step.slots)]):
            return None
        self._ready[rows] = _Ready(program, self.packs.version)
        return replayed

    def _agree(self, right: Tensor, replayed: Tensor) -> bool:
        reason = unlike(right, replayed)
        if reason is not None:
            self._refuse(reason)
        return reason is None

    def _record(self, rows: int, ids: Tensor, positions: Tensor, step: Step) -> Program | None:
        try:
            with routed(self.module):
                return recorded(self.module, self.packs, self.forward, [ids, positions, step], rows)
        except Unrecordable as reason:
            self._refuse(str(reason))
            return None

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._ready.clear()
        log.info("%s decodes through its modules: %s", type(self.module).__name__, reason)
