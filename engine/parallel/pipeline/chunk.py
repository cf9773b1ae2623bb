"""One micro-batch on one piece, as a schedule sees it: a forward and a backward that always come to an end.

A schedule's messages have to be sent whatever happens, or the next rank waits. So what a piece computes is a graph of
its own, behind one node of the graph that the schedule knows; where memory runs out in it, zeros are handed on in its
place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.parallel import dist


class Chunk:
    """`guard(forward, part)` calls a part, and gives what it gives, or None where memory ran out, now or earlier in the
    step; `before` is called first in a backward.
    """

    def __init__(self, guard: Callable[[bool, Callable[[], Any]], Any], before: Callable[[], None]) -> None:
        self._guard, self._before = guard, before
        self._inner: Tensor | None = None
        self._received: Tensor | None = None

    def forward(self, work: Callable[[Tensor | None], Tensor], received: Tensor | None, form: Tensor) -> Tensor:
        """What `work` makes of what was received, or zeros like `form`, with a way back where gradients are on."""
        trains = torch.is_grad_enabled()
        own = None if received is None else received.detach().requires_grad_(trains)
        inner = self._guard(True, lambda: work(own))
        outer = torch.zeros_like(form, device=dist.world().device) if inner is None else inner.detach()
        if not trains:
            return outer
        self._inner, self._received = inner, own
        entered = torch.zeros((), requires_grad=True) if received is None else received
        handed: Tensor = _Handed.apply(entered, outer, self)  # type: ignore[no-untyped-call]
        return handed

    def backward(self, gradient: Tensor) -> Tensor | None:
        """The gradient of what was received; None on the first rank."""
        self._guard(False, lambda: self._through(gradient))
        received, self._received = self._received, None
        if received is None:
            return None
        return torch.zeros_like(received) if received.grad is None else received.grad

    def _through(self, gradient: Tensor) -> bool:
        self._before()
        inner = self._inner
        self.let_go()
        assert inner is not None
        inner.backward(gradient)
        return True

    def let_go(self) -> None:
        """Of the graph."""
        self._inner = None


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entered: Tensor, outer: Tensor, chunk: Chunk) -> Tensor:
        ctx.chunk = chunk
        return outer.view_as(outer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.chunk.backward(gradient), None, None
