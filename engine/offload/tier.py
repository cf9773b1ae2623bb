"""One tier: parameters, where their fp32 states live, and the step over them, one sub-group after another.

The optimizer is any class of torch that steps elementwise: a sub-group's pieces of shards are handed to it as
parameters of their own, with their states, and taken back. Numbers that an optimizer keeps a parameter (its step count)
stay with the pieces in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.offload.adam import HostAdam
from engine.offload.blocks import aligned
from engine.offload.gradients import Gradients, squared_sums
from engine.offload.layout import Piece, SubGroup
from engine.offload.stores import Store
from engine.parallel import dtensors

MASTER, AVERAGE = "parameter", "average"


@dataclass(frozen=True)
class Shard:
    """A trained parameter of the module: its name, and which of the optimizer's groups it is in."""

    name: str
    parameter: nn.Parameter
    group: int

    @property
    def flat(self) -> Tensor:
        """This rank's part as one dimension, sharing its memory. FSDP2 may move it: not to be kept."""
        return dtensors.local(self.parameter.detach()).view(-1)


class Tier:
    """Shards whose states are in one store, stepped on `device`.

    `kinds` are the optimizer's states that have a parameter's shape.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        store: Store,
        gradients: Gradients,
        kinds: Sequence[str],
        device: torch.device,
    ) -> None:
        self.shards, self.store, self.gradients, self.kinds, self.device = shards, store, gradients, kinds, device
        self.let_go: Callable[[], None] | None = None  # after a sub-group's shards were written
        self.begun = [False] * len(shards)  # has the optimizer made a shard's states yet?
        self.numbers: dict[Piece, dict[str, Any]] = {}
        self._scratch: Tensor | None = None
        self._writer = _writer(shards, device, store.layout.largest)

    def squared_sums(self) -> list[tuple[nn.Parameter, float]]:
        """For each parameter the sum of squares of our part of the step's gradient."""
        self.gradients.settle()
        parts: list[list[Tensor]] = [[] for _ in self.shards]
        for group in self.store.layout.groups:
            for piece in group.pieces:
                gradient = self.gradients.piece(piece)
                if gradient is not None:
                    parts[piece.parameter].append(gradient)
        sums = squared_sums(parts, self.device)
        return [(shard.parameter, number) for shard, number in zip(self.shards, sums, strict=True)]

    def step(self, optimizer: torch.optim.Optimizer, factor: float, average: float | None) -> None:
        """Step what has a gradient (times `factor`), and send it to the module; `average` is the decay of averages."""
        groups = [
            group
            for group in self.store.layout.groups
            if average is not None or any(self.gradients.arrived(piece.parameter) for piece in group.pieces)
        ]
        known = [MASTER, *(self.kinds if any(self.begun) else ()), *((AVERAGE,) if average is not None else ())]
        adam = HostAdam() if HostAdam.serves(optimizer, self.device) else None
        for group, states in self.store.walk(groups, read=known, write=self.store.kinds):
            moving = [piece for piece in group.pieces if self.gradients.arrived(piece.parameter)]
            self._writer.begin(group)
            if adam is not None:
                for piece in moving:
                    self._step_adam(adam, optimizer, piece, states, factor)
            else:
                self._step_pieces(optimizer, moving, states, factor)
                self._cast(moving, states[MASTER])
            if average is not None:
                states[AVERAGE].lerp_(states[MASTER], 1.0 - average)
            self._cast([piece for piece in group.pieces if piece not in moving], states[MASTER])
            self._send(group)
        for shard in range(len(self.shards)):
            self.begun[shard] |= self.gradients.arrived(shard)
        self._writer.settle()

    def _cast(self, pieces: Sequence[Piece], values: Tensor) -> None:
        for piece in pieces:
            self._writer.place(piece).copy_(values[piece.place])

    def _send(self, group: SubGroup) -> None:
        self._writer.send(group)
        if self.let_go is not None:
            self.let_go()

    def _step_adam(
        self, adam: HostAdam, optimizer: torch.optim.Optimizer, piece: Piece, states: dict[str, Tensor], factor: float
    ) -> None:
        """Step one piece, and cast it."""
        own = {kind: tensor[piece.place] for kind, tensor in states.items()}
        if not self.begun[piece.parameter]:
            self.numbers[piece] = {"step": torch.zeros((), dtype=torch.float32)}
            for kind in self.kinds:
                own[kind].zero_()
        gradient = self.gradients.piece(piece)
        assert gradient is not None
        group = optimizer.param_groups[self.shards[piece.parameter].group]
        adam.step(optimizer, group, own | self.numbers[piece], gradient, factor, self._writer.place(piece))

    def _step_pieces(
        self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], states: dict[str, Tensor], factor: float
    ) -> None:
        masters: list[tuple[Piece, nn.Parameter]] = []
        # Some optimizers (Adagrad, before torch 2.13) make a parameter's states when they are built: the stand-ins'.
        first = next(iter(optimizer.state.values()), None)
        for piece in pieces:
            master = nn.Parameter(states[MASTER][piece.place])
            master.grad = self._gradient(piece, factor)
            if self.begun[piece.parameter]:
                own = {kind: states[kind][piece.place] for kind in self.kinds}
                optimizer.state[master] = {**self.numbers.get(piece, {}), **own}
            elif first is not None:
                optimizer.state[master] = {name: _like(value, master) for name, value in first.items()}
            masters.append((piece, master))
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [master for piece, master in masters if self.shards[piece.parameter].group == index]
        optimizer.step()
        for piece, master in masters:
            self._keep(piece, optimizer.state.pop(master, {}), states)
        for group in optimizer.param_groups:
            group["params"] = []

    def _keep(self, piece: Piece, state: dict[str, Any], states: dict[str, Tensor]) -> None:
        """Take back what the optimizer holds of a piece; states that it made just now go to their place."""
        for kind in self.kinds:
            place, value = states[kind][piece.place], state.pop(kind, None)
            if value is not None and value.data_ptr() != place.data_ptr():
                place.copy_(value)
        self.numbers[piece] = state

    def _gradient(self, piece: Piece, factor: float) -> Tensor:
        gradient = self.gradients.piece(piece)
        assert gradient is not None
        if gradient.dtype != torch.float32:
            if self._scratch is None:
                size, on_host = self.store.layout.largest, self.device.type == "cpu"
                self._scratch = aligned(size) if on_host else torch.empty(size, device=self.device)
            gradient = self._scratch[piece.place].copy_(gradient)
        return gradient if factor == 1.0 else gradient.mul_(factor)

    def show(self, kind: str) -> None:
        """Put the masters, or the averages, into the module."""
        for group, states in self.store.walk(self.store.layout.groups, read=[kind], write=()):
            self._writer.begin(group)
            self._cast(group.pieces, states[kind])
            self._send(group)
        self._writer.settle()

    def start_averaging(self) -> None:
        """Averages begin as the masters are."""
        if AVERAGE not in self.store.kinds:
            self.store.add(AVERAGE)
        for _, states in self.store.walk(self.store.layout.groups, read=[MASTER], write=[AVERAGE]):
            states[AVERAGE].copy_(states[MASTER])


class _Writer:
    """Brings a sub-group's values to the shards of the module, in their precision: here straight into them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    def begin(self, group: SubGroup) -> None:
        """`place` will be asked for pieces of this sub-group."""

    def place(self, piece: Piece) -> Tensor:
        """Where the values of a piece go."""
        return self._shards[piece.parameter].flat[piece.start : piece.stop]

    def send(self, group: SubGroup) -> None:
        """All pieces have their values."""

    def settle(self) -> None:
        """Until everything sent is there, for whatever comes next on the device."""


class _StreamedWriter(_Writer):
    """From the host to a GPU: cast into one of two pinned buffers, copied beside the next sub-group's step."""

    def __init__(self, shards: Sequence[Shard], largest: int) -> None:
        super().__init__(shards)
        self._staged = [torch.empty(largest, dtype=shards[0].parameter.dtype, pin_memory=True) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._stream = torch.cuda.Stream()

    def begin(self, group: SubGroup) -> None:
        self._staged.reverse()
        self._sent.reverse()
        if self._sent[0] is not None:
            self._sent[0].synchronize()

    def place(self, piece: Piece) -> Tensor:
        return self._staged[0][piece.place]

    def send(self, group: SubGroup) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still read what is overwritten
        with torch.cuda.stream(self._stream):
            for piece in group.pieces:
                super().place(piece).copy_(self.place(piece), non_blocking=True)
            self._sent[0] = self._stream.record_event()

    def settle(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


def _writer(shards: Sequence[Shard], device: torch.device, largest: int) -> _Writer:
    streams = shards[0].flat.device.type == "cuda" and device.type == "cpu"
    return _StreamedWriter(shards, largest) if streams else _Writer(shards)


def _like(value: Any, parameter: Tensor) -> Any:
    """A state of a stand-in (one number) for a parameter of any size."""
    if not isinstance(value, Tensor):
        return value
    return torch.full_like(parameter, value.item()) if value.ndim else value.clone()
