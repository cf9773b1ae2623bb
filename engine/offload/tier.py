"""One tier of an offloaded optimizer: parameters, the storage of their fp32 states, and the step on one device.

The step goes through the sub-groups in order. The optimizer is any class of torch that steps elementwise: it gets the
segments of a sub-group as parameters with their states. Scalar states such as the step count stay in memory, one per
segment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.offload.gradients import Gradients
from engine.offload.states import Segment, States, SubGroup
from engine.parallel import dtensors

MASTER, AVERAGE = "parameter", "average"


@dataclass(frozen=True)
class Shard:
    """A trained parameter of the module: its name, and the index of its optimizer group."""

    name: str
    parameter: nn.Parameter
    group: int

    @property
    def flat(self) -> Tensor:
        """The local shard as one dimension, without a copy. FSDP2 may move it, so do not store it."""
        return dtensors.local(self.parameter.detach()).view(-1)


class Tier:
    """Shards whose states are in `states`, stepped on `device`.

    `moments` names the optimizer's states that have the shape of the parameter. `after_write` is called when the shards
    of a sub-group have new values in the module.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        states: States,
        moments: Sequence[str],
        device: torch.device,
        after_write: Callable[[], None] | None = None,
    ) -> None:
        self.shards, self.states, self.moments, self.device = shards, states, moments, device
        self.gradients = Gradients(device)
        self.scalars: dict[Segment, dict[str, Any]] = {}  # of the segments that were stepped
        self._after_write = after_write
        self._fp32_gradients: Tensor | None = None
        self._writer = _ModuleWriter(shards, device, states.largest_sub_group)

    def sums_of_squares(self) -> list[tuple[nn.Parameter, float]]:
        """Return each parameter with the sum of squares of the local gradient."""
        sums = self.gradients.sums_of_squares()
        return [(shard.parameter, sums.get(number, 0.0)) for number, shard in enumerate(self.shards)]

    def step(self, optimizer: torch.optim.Optimizer, factor: float, average_weight: float | None) -> None:
        """Step the shards that have a gradient, multiplied by `factor`, and write them to the module.

        `average_weight` is the weight of the new master weights in their average; None if there is no average.
        """
        groups = [
            group
            for group in self.states.sub_groups
            if average_weight is not None or any(self.gradients.has(segment.shard) for segment in group.segments)
        ]
        for group, states in self.states.iterate(groups, list(self.states.tensors)):
            segments = [segment for segment in group.segments if self.gradients.has(segment.shard)]
            self._step_segments(optimizer, segments, states, factor)
            if average_weight is not None:
                states[AVERAGE].lerp_(states[MASTER], average_weight)
            self._write(group, states[MASTER])

    def write_to_module(self, kind: str) -> None:
        """Write the master weights or the averages into the module."""
        for group, states in self.states.iterate(self.states.sub_groups, [kind], store=False):
            self._write(group, states[kind])

    def start_averaging(self) -> None:
        """Set the averages to the master weights."""
        if AVERAGE not in self.states.tensors:
            self.states.add(AVERAGE)
        for _, states in self.states.iterate(self.states.sub_groups, [MASTER, AVERAGE]):
            states[AVERAGE].copy_(states[MASTER])

    def _write(self, group: SubGroup, values: Tensor) -> None:
        self._writer.write(group, values)
        if self._after_write is not None:
            self._after_write()

    def _step_segments(
        self, optimizer: torch.optim.Optimizer, segments: Sequence[Segment], states: dict[str, Tensor], factor: float
    ) -> None:
        masters: list[tuple[Segment, nn.Parameter]] = []
        # Adagrad before torch 2.13 creates states when it is built: `initial` has those of the one-element stand-ins.
        initial = next(iter(optimizer.state.values()), None)
        for segment in segments:
            master = nn.Parameter(states[MASTER][segment.slice])
            master.grad = self._fp32_gradient(segment, factor)
            if segment in self.scalars:
                moments = {kind: states[kind][segment.slice] for kind in self.moments}
                optimizer.state[master] = self.scalars[segment] | moments
            elif initial is not None:
                optimizer.state[master] = {name: _full_like(value, master) for name, value in initial.items()}
            masters.append((segment, master))
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [master for segment, master in masters if self.shards[segment.shard].group == index]
        optimizer.step()
        for segment, master in masters:
            self._store(segment, optimizer.state.pop(master, {}), states)
        for group in optimizer.param_groups:
            group["params"] = []

    def _store(self, segment: Segment, state: dict[str, Any], states: dict[str, Tensor]) -> None:
        """Copy moments that the optimizer has just created to their storage, and keep the scalars."""
        for kind in self.moments:
            stored, value = states[kind][segment.slice], state.pop(kind, None)
            if value is not None and value.data_ptr() != stored.data_ptr():
                stored.copy_(value)
        self.scalars[segment] = state

    def _fp32_gradient(self, segment: Segment, factor: float) -> Tensor:
        gradient = self.gradients.of(segment)
        assert gradient is not None
        if gradient.dtype != torch.float32:
            if self._fp32_gradients is None:
                self._fp32_gradients = torch.empty(self.states.largest_sub_group, device=self.device)
            gradient = self._fp32_gradients[segment.slice].copy_(gradient)
        return gradient if factor == 1.0 else gradient.mul_(factor)


class _ModuleWriter:
    """Casts the fp32 values of a sub-group to the module's precision and writes them to its shards.

    From the CPU to a GPU the values go through two pinned buffers: one is copied while the next sub-group is stepped.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device, size: int) -> None:
        self._shards = shards
        is_upload = shards[0].flat.device.type == "cuda" and device.type == "cpu"
        dtype = shards[0].parameter.dtype
        self._pinned = [torch.empty(size, dtype=dtype, pin_memory=True) for _ in range(2)] if is_upload else []
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def write(self, group: SubGroup, values: Tensor) -> None:
        """Write the values (fp32, flat) of a sub-group; a copy to a GPU may be pending on its current stream."""
        if not self._pinned:
            for segment in group.segments:
                self._shard(segment).copy_(values[segment.slice])
            return
        self._pinned.reverse()
        self._copied.reverse()
        if self._copied[0] is not None:
            self._copied[0].synchronize()  # the last copy of this buffer
        buffer = self._pinned[0][: group.size].copy_(values)
        for segment in group.segments:
            self._shard(segment).copy_(buffer[segment.slice], non_blocking=True)
        self._copied[0] = torch.cuda.current_stream().record_event()

    def _shard(self, segment: Segment) -> Tensor:
        return self._shards[segment.shard].flat[segment.start : segment.stop]


def _full_like(value: Any, parameter: Tensor) -> Any:
    """Expand a state of a one-element parameter to the shape of `parameter`."""
    if not isinstance(value, Tensor):
        return value
    return torch.full_like(parameter, value.item()) if value.ndim else value.clone()
