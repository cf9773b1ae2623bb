"""A piece at work: it takes the hidden states of the rank before, and ends with those that the next rank gets.

A pass calls what the whole model would be called by (a loss). The first block of the piece gets what was received in
the place of its input, and behind the last one the pass is left by an exception, as `torch.utils.checkpoint` leaves a
recomputation; norm, head and loss run on the last rank alone. Hidden states travel as rows of tokens, as many as the
largest micro-batch of the step has: a schedule's messages all have one shape, the micro-batches need not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from engine.parallel import dist
from engine.parallel.pipeline.piece import Piece


class _Left(Exception):
    """The piece is done; the rest of the pass is the next rank's."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Stage:
    """One piece, as a schedule runs it.

    `rows` is how many tokens a message has. A call of the module outside of a pass goes through all pieces, one after
    another, and gives every rank the last one's answer; only without gradients.
    """

    def __init__(self, module: nn.Module, piece: Piece, dtype: torch.dtype) -> None:
        """After the module was sharded: what FSDP2 does around blocks happens inside of what is done here."""
        self._piece, self._dtype = piece, dtype
        self._passing = False
        self._received: Tensor | None = None
        self.rows = 0
        module.forward = partial(self._forward, module.forward)  # type: ignore[method-assign]
        if not piece.is_first:
            piece.blocks[0].register_forward_pre_hook(self._take, prepend=True, with_kwargs=True)
        if not piece.is_last:
            piece.blocks[-1].register_forward_hook(self._leave)
            module.register_forward_hook(self._leave_module)

    def message(self) -> Tensor:
        """What a message looks like, on the meta device: (rows, D)."""
        return torch.empty(self.rows, self._piece.width, dtype=self._dtype, device="meta", requires_grad=True)

    def run(self, work: Callable[[], Any], received: Tensor | None) -> Any:
        """What `work` gives on the last rank; on the others the message (rows, D) to the next."""
        self._passing, self._received = True, received
        try:
            return work()
        except _Left as left:
            return left.hidden
        finally:
            self._passing, self._received = False, None

    def _forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's forward. It returns, for what FSDP2 does behind it, before the pass is left."""
        if not self._passing:
            return self._through_all(partial(inner, *args, **kwargs))
        try:
            return inner(*args, **kwargs)
        except _Left as left:
            flat = left.hidden.flatten(0, -2).to(self._dtype)
            return pad(flat, (0, 0, 0, self.rows - len(flat))).contiguous()

    def _take(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put what was received in the place of a block's first input, which tells its shape."""
        received, self._received = self._received, None
        if received is None:
            raise ValueError("pipeline_parallel: a loss calls its module once a micro-batch")
        name = None if args else next(iter(kwargs))
        stand_in = kwargs[name] if name is not None else args[0]
        like = stand_in[0] if isinstance(stand_in, tuple) else stand_in
        hidden = received[: like.shape[:-1].numel()].view(like.shape)
        return (args, kwargs | {name: hidden}) if name is not None else ((hidden, *args[1:]), kwargs)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        raise _Left(output[0] if isinstance(output, tuple) else output)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._passing:
            raise _Left(output)

    def _through_all(self, call: Callable[[], Any]) -> Any:
        """Each piece in turn; what one raises all raise, so that no rank waits for a message that never comes."""
        if torch.is_grad_enabled():
            raise ValueError("pipeline_parallel trains by Engine.update; a module alone is called without gradients")
        group, value = dist.along_pipeline(), None
        for turn in range(self._piece.size):
            problem = None
            if turn == self._piece.rank:
                value, problem = self._attempt(call, value)
            value, problem = dist.broadcast_object((_moved(value, "cpu"), problem), source=turn, group=group)
            if problem is not None:
                raise problem
            value = _moved(value, dist.world().device)
        return value

    def _attempt(self, call: Callable[[], Any], received: Any) -> tuple[Any, Exception | None]:
        if received is not None:
            self._received = received.flatten(0, -2)
        try:
            return call(), None
        except _Left as left:
            return left.hidden, None
        except Exception as problem:
            return None, problem
        finally:
            self._received = None


def _moved(value: Any, device: torch.device | str) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
