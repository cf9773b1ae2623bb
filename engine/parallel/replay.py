"""The collectives of a pass, noted while it runs, so that a rank that fails in its middle can go through the rest.

FSDP2 gathers and reduces inside forward and backward. A rank that leaves a pass half done would leave the others
waiting; with the note of a whole pass it takes part in what is left with zeros, and what comes of the pass is thrown
away on every rank. Every rank issues the same collectives in the same order, whatever its batch: FSDP2 needs that too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from engine.parallel import board as boards
from engine.parallel import dist
from engine.parallel.board import Board, Entry
from engine.parallel.meeting import Meeting

# FSDP2 looks these up in `torch.distributed` at each call; the second name of a pair is that of torch before 2.13.
NOTED = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "all_gather",
)


@dataclass(frozen=True)
class _Like:
    """A tensor's form, to make one of zeros from."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Call:
    """One collective, without the numbers in it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def again(self) -> None:
        """Take part in it with zeros; returns when it is done."""
        arguments = [_filled(value) for value in self.arguments]
        keywords = {name: False if name == "async_op" else _filled(value) for name, value in self.keywords.items()}
        self.function(*arguments, **keywords)


@dataclass
class Note:
    """The collectives of one pass, in order, those among mates left out: these stand on `board`."""

    board: Board | None = None
    calls: list[Call] = field(default_factory=list)
    begun: Entry | None = None  # written on the board, and not through when the pass failed

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the block every collective of the training groups is added, and every meeting."""
        known = [(torch.distributed, name) for name in NOTED if hasattr(torch.distributed, name)]
        originals = [(owner, name, getattr(owner, name)) for owner, name in [*known, (Meeting, "meet")]]
        deep = [False]  # some of these functions call one another
        try:
            for owner, name, function in originals:
                setattr(owner, name, self._noting(name, function, deep))
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)

    def over(self) -> None:
        """The pass came through."""
        if self.board is not None:
            self.board.write(Entry(boards.OVER))

    def finish(self, reached: "Note") -> None:
        """Take part in the collectives of this pass that follow after those that were `reached`."""
        left = iter(self.calls[len(reached.calls) :])
        if self.board is not None:
            self._follow(self.board, reached.begun, left)
        for call in left:
            call.again()
        if dist.world().device.type == "cuda":
            torch.cuda.synchronize()

    def _follow(self, board: Board, begun: Entry | None, left: Iterator[Call]) -> None:
        """The mates, until they are through, or none of them is left in the pass."""
        entry = begun or board.follow()
        while entry.kind not in (boards.FAILED, boards.OVER):
            if entry.kind == boards.SHARD:
                next(left).again()
            else:
                entry.take_part()
            entry = board.follow()

    def _noting(self, name: str, function: Callable[..., Any], deep: list[bool]) -> Callable[..., Any]:
        @wraps(function)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if deep[0] or dist.beside_training(keywords.get("group")):
                return function(*arguments, **keywords)
            among_mates = keywords.get("group") in dist.groups_of_mates()
            if self.board is not None:
                self.begun = boards.entry_of(name, arguments, keywords) if among_mates else Entry(boards.SHARD)
                self.board.write(self.begun)
            forms = tuple(_form(value) for value in arguments)
            call = Call(function, forms, {key: _form(value) for key, value in keywords.items()})
            deep[0] = True
            try:
                result = function(*arguments, **keywords)
            finally:
                deep[0] = False
            self.begun = None
            if not among_mates:
                self.calls.append(call)  # not where it raised: then it is still to be done
            return result

        return noted


def _form(value: Any) -> Any:
    return _Like(value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _filled(value: Any) -> Any:
    return value.zeros() if isinstance(value, _Like) else value
