"""The forwards of static steps: the model's own calls, or a recording of them with fewer and larger ones.

What a small step takes on a GPU is reading the weights, and then launches: a layer of Llama spelled in PyTorch's
operators takes some forty, most of them to norm, turn and gate a few rows. Recorded (`generation/recorded`), a norm
with the residual before it is one kernel, a turn of heads another. A recording serves one number of rows; it is made
and held against the module on tokens of a trial in the scratch slot, before a graph is captured of it.
"""

import logging

import torch
from torch import Tensor, nn

from engine.generation.attention import routed
from engine.generation.on_device.attention import NAME, Queries
from engine.generation.on_device.caches import Caches
from engine.generation.packed import PackedLinears
from engine.generation.recorded.making import recorded, unlike
from engine.generation.recorded.program import Program
from engine.generation.served import positions_of
from engine.healing.failure import is_out_of_memory

log = logging.getLogger(__name__)
FEW = 64  # positions that a trial takes where the configuration says nothing of them


class Forwards:
    """Called with token ids (1, b), positions (1, b) and what attention is told; gives logits (1, b, V).

    `refused` says for which numbers of rows, and why, the module's own calls are made.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.packs = PackedLinears(module, device.type)
        self.refused: dict[int, str] = {}
        self._programs: dict[int, Program] = {}  # by the number of rows

    @property
    def ready(self) -> set[int]:
        """The numbers of rows of which there is a recording."""
        return set(self._programs)

    def __call__(self, token_ids: Tensor, positions: Tensor, queries: Queries) -> Tensor:
        program = self._programs.get(token_ids.shape[1])
        if program is None:
            return self._called(token_ids, positions, queries)
        logits: Tensor = program(token_ids, positions, queries)
        return logits

    def bind(self) -> None:
        """Take weights and buffers as they are now, and new memory: graphs of before are of no use any more."""
        self.packs.refresh()
        for program in self._programs.values():
            program.bind()

    def unbind(self) -> None:
        """Let go of weights and memory until `bind`."""
        self.packs.release()
        for program in self._programs.values():
            program.unbind()

    @torch.inference_mode()
    def prepare(self, rows: int, caches: Caches) -> None:
        """Record a step of `rows` rows, if it can be and isn't yet. Writes to the last slot; waits for the device."""
        if rows in self.refused or rows in self._programs:
            return
        token_ids, queries = self._trial(rows, caches)
        positions = queries.places[None]
        right = self._called(token_ids, positions, queries)
        try:
            others = (token_ids + 1) % self._vocabulary
            program = recorded(self.module, self.packs, self._called, [others, positions, queries], rows)
            reason = unlike(right, program(token_ids, positions, queries))
        except Exception as problem:  # Unrecordable, or whatever a call says to other numbers than it was recorded with
            if is_out_of_memory(problem):
                raise
            reason = str(problem)
        if reason is None:
            self._programs[rows] = program
        else:
            self.refused[rows] = reason
            log.info("%s decodes %d rows by its own calls: %s", type(self.module).__name__, rows, reason)

    def _trial(self, rows: int, caches: Caches) -> tuple[Tensor, Queries]:
        """Tokens (1, rows) of no prompt, at places of their own in the scratch slot; where they share one they are the
        same.
        """
        # A position too high would be the end of the process on a GPU.
        places = min(caches.answers.capacity, positions_of(self.module) or FEW)
        positions = places - 1 - torch.arange(rows, device=self.device) % places
        slots, none = torch.full_like(positions, caches.slots), torch.zeros_like(positions)
        queries = Queries(caches, slots, positions, positions + 1, none, none)
        return ((positions * 31 + 1) % self._vocabulary)[None], queries

    @property
    def _vocabulary(self) -> int:
        size: int = self.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
        return size

    def _called(self, token_ids: Tensor, positions: Tensor, queries: Queries) -> Tensor:
        with routed(self.module, NAME):
            output = self.module(input_ids=token_ids, position_ids=positions, use_cache=False, slots=queries)
        logits: Tensor = output.logits
        return logits
