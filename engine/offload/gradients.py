"""Gradients leave the module as FSDP2 finishes reducing them, while backward still runs.

A hook on each sharded parameter takes the reduced gradient and clears it, so that at most one unit's gradients are on
the device. A lone micro-batch's gradients are kept in the precision they come in: what FSDP2 hands out has been rounded
to the parameter's precision already, and fp32 would hold the same numbers in twice the memory. Sums over several
micro-batches are fp32.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.offload.layout import Layout, Piece
from engine.parallel import dist, dtensors

LANDINGS = 4  # pinned buffers on the way from the device to a sum on the host


class Gradients(Protocol):
    """Flat gradients of shards, by their number."""

    def arrive(self, shard: int, gradient: Tensor) -> None:
        """Add a micro-batch's gradient (flat)."""

    def settle(self) -> None:
        """Until all that arrived is where `piece` finds it."""

    def piece(self, piece: Piece) -> Tensor | None:
        """A piece of the step's gradient; None where none arrived."""

    def arrived(self, shard: int) -> bool:
        """Whether the step has a gradient of this shard."""

    def forget(self, shard: int) -> None:
        """Have no gradient of this shard, after `settle`."""

    def clear(self) -> None:
        """Forget the step's gradients."""

    @property
    def bytes(self) -> int:
        """What is held of gradients now, and of buffers on their way."""


class Kept:
    """Gradients that stay where they arrive: on a device, and on a machine whose device is the host."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def arrive(self, shard: int, gradient: Tensor) -> None:
        before = self._found.get(shard)
        self._found[shard] = gradient if before is None else before.float().add_(gradient)

    def settle(self) -> None:
        pass

    def piece(self, piece: Piece) -> Tensor | None:
        found = self._found.get(piece.parameter)
        return None if found is None else found[piece.start : piece.stop]

    def arrived(self, shard: int) -> bool:
        return shard in self._found

    def forget(self, shard: int) -> None:
        self._found.pop(shard, None)

    def clear(self) -> None:
        self._found.clear()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._found.values())


class Streamed:
    """Gradients that go from a GPU to the host, beside what the GPU computes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._slots: dict[int, Tensor] = {}  # lone micro-batch: pinned, in the gradient's precision
        self._sums: dict[int, Tensor] = {}  # several: fp32
        self._landings: list[Tensor] = []
        self._adding: list[Future[None]] = []
        self._adder = ThreadPoolExecutor(1, thread_name_prefix="gradients")  # one, so that sums have one order
        self._counts: dict[int, int] = {}

    def arrive(self, shard: int, gradient: Tensor) -> None:
        """On the stream that reduced it. A first one lands in its slot, later ones are added to a sum on the host."""
        count = self._counts[shard] = self._counts.get(shard, 0) + 1
        if count == 1:
            if shard not in self._slots:
                self._slots[shard] = torch.empty(gradient.numel(), dtype=gradient.dtype, pin_memory=True)
            self._slots[shard].copy_(gradient, non_blocking=True)
            gradient.record_stream(torch.cuda.current_stream())
            return
        landing = self._landing(gradient)
        landing.copy_(gradient, non_blocking=True)
        gradient.record_stream(torch.cuda.current_stream())
        landed = torch.cuda.current_stream().record_event()
        self._adding.append(self._adder.submit(self._add, shard, landing, landed, count))

    def _add(self, shard: int, landing: Tensor, landed: torch.cuda.Event, count: int) -> None:
        landed.synchronize()  # the slot's copy was before it on the same stream
        if count == 2:
            total = self._sums.get(shard)
            self._sums[shard] = self._slots[shard].float() if total is None else total.copy_(self._slots[shard])
        self._sums[shard].add_(landing)

    def _landing(self, gradient: Tensor) -> Tensor:
        """A pinned buffer that nothing is in flight through: they go round, one addition behind the other."""
        if len(self._adding) >= LANDINGS:
            self._adding.pop(0).result()
        size = max(self._layout.sizes)
        room = len(self._landings) < LANDINGS
        following = torch.empty(size, dtype=gradient.dtype, pin_memory=True) if room else self._landings.pop(0)
        self._landings.append(following)
        return self._landings[-1][: gradient.numel()]

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()  # FSDP2 made it wait for the stream of the copies
        for adding in self._adding:
            adding.result()
        self._adding.clear()

    def piece(self, piece: Piece) -> Tensor | None:
        count = self._counts.get(piece.parameter, 0)
        found = (self._slots if count == 1 else self._sums)[piece.parameter] if count else None
        return None if found is None else found[piece.start : piece.stop]

    def arrived(self, shard: int) -> bool:
        return shard in self._counts

    def forget(self, shard: int) -> None:
        self._counts.pop(shard, None)

    def clear(self) -> None:
        self.settle()
        self._counts.clear()

    @property
    def bytes(self) -> int:
        held = [*self._slots.values(), *self._sums.values(), *self._landings]
        return sum(tensor.nbytes for tensor in held)


def take(parameter: nn.Parameter, shard: int, gradients: Gradients) -> None:
    """From now on a parameter's reduced gradient goes to `gradients`."""

    def hook(reduced: Tensor) -> None:
        gradient = reduced.grad
        assert gradient is not None
        local = dtensors.local(gradient).detach().reshape(-1)
        if local.device.type == "cpu" and dist.world().device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # FSDP2 may still be copying it off the device
        reduced.grad = None
        gradients.arrive(shard, local)

    parameter.register_post_accumulate_grad_hook(hook)


def squared_sums(parts: Sequence[Sequence[Tensor]], device: torch.device) -> list[float]:
    """The sum of squares over each group of tensors, in one transfer from `device`."""
    zero = torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float32) for pieces in parts for piece in pieces]
    squares = iter(torch.stack([zero, *norms]).double().square().tolist()[1:])
    return [sum(next(squares) for _ in pieces) for pieces in parts]
