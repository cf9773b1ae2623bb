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

from engine.parallel import dist

# FSDP2 looks these up in `torch.distributed` at each call; the second name of a pair is that of torch before 2.13.
NOTED = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_reduce", "all_to_all_single", "broadcast",
)  # fmt: skip


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
        keywords = {name: _filled(value) for name, value in self.keywords.items()}
        self.function(*arguments, **(keywords | {"async_op": False}))


@dataclass
class Note:
    """The collectives of one pass, in order."""

    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the block every collective of the training groups is added."""
        originals = {name: getattr(torch.distributed, name) for name in NOTED if hasattr(torch.distributed, name)}
        deep = [False]  # some of these functions call one another
        try:
            for name, function in originals.items():
                setattr(torch.distributed, name, self._noting(function, deep))
            yield
        finally:
            for name, function in originals.items():
                setattr(torch.distributed, name, function)

    def finish(self, done: int) -> None:
        """Take part in the collectives after the first `done`."""
        for call in self.calls[done:]:
            call.again()
        if dist.world().device.type == "cuda":
            torch.cuda.synchronize()

    def _noting(self, function: Callable[..., Any], deep: list[bool]) -> Callable[..., Any]:
        @wraps(function)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if deep[0] or dist.beside_training(keywords.get("group")):
                return function(*arguments, **keywords)
            forms = tuple(_form(value) for value in arguments)
            call = Call(function, forms, {name: _form(value) for name, value in keywords.items()})
            deep[0] = True
            try:
                result = function(*arguments, **keywords)
            finally:
                deep[0] = False
            self.calls.append(call)  # not where it raised: then it is still to be done
            return result

        return noted


def _form(value: Any) -> Any:
    return _Like(value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value


def _filled(value: Any) -> Any:
    return value.zeros() if isinstance(value, _Like) else value
