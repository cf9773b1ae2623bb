"""One tier of an offloaded optimizer: parameters, their gradients and fp32 states, and the step on one device.

Each reduced gradient goes from FSDP2 to `GradientSums`, and not to `parameter.grad`, so at most one FSDP unit's
gradients are on the device. The gradient of a single micro-batch stays in the parameter's precision, to which FSDP2 has
rounded it. Sums over several micro-batches are fp32. A sum in host memory is computed on the GPU, as in ZeRO-Offload:
upload the sum, add, download.

The step goes through the sub-groups in order. The optimizer is any class of torch that steps elementwise: a new one
gets the segments of a sub-group as parameters with their states. Scalar states such as the step count stay in memory.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine import optim
from engine.config import OptimizerConfig
from engine.host_memory import pinned
from engine.offload.states import Segment, States, SubGroup
from engine.parallel import dtensors

MASTER, AVERAGE = "parameter", "average"


@dataclass(frozen=True)
class TrainedShard:
    """A trained parameter of the module, with its name and its weight decay."""

    name: str
    parameter: nn.Parameter
    decay: float

    @property
    def flat(self) -> Tensor:
        """The local shard as one dimension, without a copy. FSDP2 may move it, so do not store it."""
        return dtensors.local(self.parameter.detach()).view(-1)


class GradientSums:
    """Flat gradients of shards, stored on `device` until the optimizer step: `sums` by number of the shard."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.sums: dict[int, Tensor] = {}
        self._pinned: dict[int, Tensor] = {}  # the memory of sums that a GPU computes, the same in each step
        self._is_downloaded = False

    def add(self, shard: int, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch. A copy to host memory is pinned, and the host does not wait for it."""
        gradient = gradient.detach().reshape(-1)
        previous = self.sums.get(shard)
        if previous is not None:
            # Upload before the cast: a cast on the CPU would not wait for the download of `previous`.
            gradient = previous.to(gradient.device, non_blocking=True).float().add_(gradient)
        if gradient.device.type != self._device.type:
            gradient.record_stream(torch.cuda.current_stream())
            gradient = self._memory(shard, gradient).copy_(gradient, non_blocking=True)
            self._is_downloaded = True
        self.sums[shard] = gradient

    def _memory(self, shard: int, gradient: Tensor) -> Tensor:
        """Return pinned memory for a gradient. An fp32 sum takes the place of the 16-bit gradient that was uploaded."""
        if shard not in self._pinned or self._pinned[shard].nbytes < gradient.nbytes:
            torch.cuda.current_stream().synchronize()  # the upload from smaller memory, which is freed, is complete
            self._pinned[shard] = pinned(gradient.nbytes, torch.uint8)
        return self._pinned[shard][: gradient.nbytes].view(gradient.dtype)

    def wait(self) -> None:
        """Wait until the copies from the GPU are complete."""
        if self._is_downloaded:
            torch.cuda.current_stream().synchronize()  # FSDP2 made this stream wait for the stream of the copies

    def clear(self) -> None:
        """Drop all gradients."""
        self.wait()
        self.sums.clear()

    def norm(self, shard: int) -> Tensor:
        """Return the norm of the gradient of this shard, () fp32: 0 without a gradient. Call `wait` before."""
        gradient = self.sums.get(shard, torch.zeros(0, device=self._device))
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)

    @property
    def bytes(self) -> int:
        """Return the memory of the gradients."""
        return sum(memory.nbytes for memory in (self._pinned or self.sums).values())


class Tier:
    """Shards whose states are in `states`, stepped on the device of the states.

    `after_write` is called when the shards of a sub-group have new values in the module.
    """

    def __init__(
        self,
        shards: Sequence[TrainedShard],
        states: States,
        config: OptimizerConfig,
        after_write: Callable[[], None] | None = None,
    ) -> None:
        self.shards, self.states, self._config = shards, states, config
        self._example = optim.example_states(config, states.device)  # of any parameter
        self.moments = [kind for kind, value in self._example.items() if value.ndim]  # the others are scalars
        for kind in (MASTER, *self.moments):
            states.add(kind)
        self.gradients = GradientSums(states.device)
        self._scalars: dict[int, dict[str, Any]] = {}  # of the shards that were stepped
        self._after_write = after_write
        self._fp32_gradients: Tensor | None = None
        self._is_upload = states.device.type == "cpu" and shards[0].flat.device.type == "cuda"

    def update_masters(self) -> None:
        """Copy the shards of the module that are not their rounded master weights to the master weights."""
        for number, shard in enumerate(self.shards):
            master, values = self.states.shard(MASTER, number), shard.flat
            is_rounded = torch.equal(master.to(values), values)
            self.states.write(MASTER, number, master if is_rounded else values)

    def gradient_norms(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with the norm of its local gradient."""
        self.gradients.wait()
        return [(shard.parameter, self.gradients.norm(number)) for number, shard in enumerate(self.shards)]

    def state(self, number: int, averages: Sequence[str]) -> dict[str, Any]:
        """Return the states of a shard by kind: master weight, moments, averages, scalars."""
        shape, scalars = dtensors.local(self.shards[number].parameter).shape, self._scalars.get(number)
        kinds = (MASTER, *averages, *(() if scalars is None else self.moments))
        return {kind: self.states.shard(kind, number).view(shape) for kind in kinds} | (scalars or {})

    def allocate_scalars(self, names: Collection[str]) -> None:
        """Give scalar states to exactly the named shards, so that they have all states."""
        scalars = {kind: value for kind, value in self._example.items() if not value.ndim}
        self._scalars = {
            number: {kind: torch.zeros_like(value) for kind, value in scalars.items()}
            for number, shard in enumerate(self.shards)
            if shard.name in names
        }

    def step(self, lr: float, factor: float, average_weight: float | None) -> None:
        """Step the shards that have a gradient, multiplied by `factor`, and write them to the module.

        `average_weight` is the weight of the new master weights in their average; None if there is no average.
        """
        groups = [
            group
            for group in self.states.sub_groups
            if average_weight is not None or any(segment.shard in self.gradients.sums for segment in group.segments)
        ]
        for group, states in self.states.iterate(groups, list(self.states.tensors)):
            segments = [segment for segment in group.segments if segment.shard in self.gradients.sums]
            if segments:
                self._step_segments(segments, states, lr, factor)
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
        """Write fp32 values of a sub-group into the module's shards; copies to a GPU may be pending on its stream."""
        if self._is_upload:  # torch uses this pinned memory again after the copies that read it
            pinned = torch.empty(group.size, dtype=self.shards[0].parameter.dtype, pin_memory=True)
            values = pinned.copy_(values)
        for segment in group.segments:
            shard = self.shards[segment.shard].flat[segment.start : segment.stop]
            shard.copy_(values[segment.slice], non_blocking=self._is_upload)
        if self._after_write is not None:
            self._after_write()

    def _step_segments(self, segments: Sequence[Segment], states: dict[str, Tensor], lr: float, factor: float) -> None:
        masters = [(segment, nn.Parameter(states[MASTER][segment.slice])) for segment in segments]
        groups: dict[float, list[nn.Parameter]] = {}  # by weight decay
        for segment, master in masters:
            groups.setdefault(self.shards[segment.shard].decay, []).append(master)
        optimizer = optim.with_groups([(m, decay) for decay, m in groups.items()], replace(self._config, lr=lr))
        for segment, master in masters:
            master.grad = self._fp32_gradient(segment, factor)
            if segment.shard in self._scalars:
                scalars = {kind: value.clone() for kind, value in self._scalars[segment.shard].items()}
                optimizer.state[master] = scalars | {kind: states[kind][segment.slice] for kind in self.moments}
        optimizer.step()
        for segment, master in masters:
            self._store(segment, optimizer.state[master], states)

    def _store(self, segment: Segment, state: dict[str, Any], states: dict[str, Tensor]) -> None:
        """Copy moments that the optimizer has just created to their storage. The last segment's scalars are stored."""
        for kind in self.moments:
            stored, value = states[kind][segment.slice], state.pop(kind, None)
            if value is not None and value.data_ptr() != stored.data_ptr():
                stored.copy_(value)
        if segment.stop == self.shards[segment.shard].flat.numel():
            self._scalars[segment.shard] = {kind: value for kind, value in state.items() if isinstance(value, Tensor)}

    def _fp32_gradient(self, segment: Segment, factor: float) -> Tensor:
        gradient = self.gradients.sums[segment.shard][segment.start : segment.stop]
        if gradient.dtype != torch.float32:
            if self._fp32_gradients is None:
                self._fp32_gradients = torch.empty(self.states.largest_sub_group, device=self.states.device)
            gradient = self._fp32_gradients[segment.slice].copy_(gradient)
        return gradient if factor == 1.0 else gradient.mul_(factor)
