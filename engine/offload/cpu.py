"""Optimizer states in memory, and AdamW steps on a CPU.

The same class holds the states that stay on a device (`offload_ratio` below 1).

A CPU step is bound by memory bandwidth. Torch's fused AdamW moves 28 bytes per parameter. The cast of the gradient, its
scaling and the cast of the new weights would move 20 bytes more. `AdamStep` therefore works in chunks that fit the
cache. It leaves out `amsgrad` and `maximize`; `torch.optim` itself steps those.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.offload.direct_io import aligned
from engine.offload.layout import Layout, SubGroup

CHUNK = 2**16  # parameters per thread: 1 MiB of masters, gradients and moments fits a core's second-level cache
MOMENTS = ("exp_avg", "exp_avg_sq")


class MemoryStates:
    """Flat fp32 states by kind ("parameter" is the master weight) in the memory of `device`."""

    def __init__(self, layout: Layout, kinds: Sequence[str], device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._regions: dict[str, Tensor] = {}
        for kind in kinds:
            self.add(kind)

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of state that have memory."""
        return list(self._regions)

    def add(self, kind: str) -> None:
        """Allocate another kind of state."""
        length, on_cpu = self.layout.length, self.device.type == "cpu"
        self._regions[kind] = aligned(length) if on_cpu else torch.zeros(length, device=self.device)

    def iterate(
        self, groups: Sequence[SubGroup], *, read: Iterable[str], write: Iterable[str]
    ) -> Iterator[tuple[SubGroup, dict[str, Tensor]]]:
        """Yield each sub-group with its flat tensors by kind. All kinds are read and written in place."""
        for group in groups:
            yield group, {kind: region[group.start : group.stop] for kind, region in self._regions.items()}

    def read(self, kind: str, shard: int) -> Tensor:
        """Return the elements of one shard, flat, without a copy."""
        offset = self.layout.offsets[shard]
        return self._regions[kind][offset : offset + self.layout.sizes[shard]]

    def write(self, kind: str, shard: int, values: Tensor) -> None:
        """Replace the elements of one shard."""
        self.read(kind, shard).view(values.shape).copy_(values.detach())

    def wait(self) -> None:
        """Return at once: memory has no pending writes."""

    @property
    def bytes(self) -> int:
        """Return the size of all states."""
        return sum(region.nbytes for region in self._regions.values())


class AdamStep:
    """Chunked steps of a `torch.optim.Adam` or `AdamW` with fused=True on a CPU."""

    def __init__(self) -> None:
        self._scaled = torch.empty(0)

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
        """Return whether this class computes what `optimizer` does on `device`."""
        defaults = optimizer.defaults
        is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and device.type == "cpu"
        return is_adam and bool(defaults["fused"]) and not (defaults["amsgrad"] or defaults["maximize"])

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        states: Mapping[str, Tensor],
        gradient: Tensor,
        factor: float,
        target: Tensor,
    ) -> None:
        """Update flat `states` (parameter, exp_avg, exp_avg_sq, and the scalar step) with `factor` * `gradient`.

        `group` has the hyperparameters. `target` receives the new parameters in its own precision.
        """
        states["step"].add_(1.0)
        # torch.optim's classes call the same functions, from torch 2.11 to 2.13.
        decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("decoupled_weight_decay")
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        size = CHUNK * torch.get_num_threads()
        flat = [states["parameter"], *(states[kind] for kind in MOMENTS), gradient, target]
        for master, mean, square, raw, out in zip(*(tensor.split(size) for tensor in flat), strict=True):
            fused(
                [master],
                [self._scale(raw, factor, size)],
                [mean],
                [square],
                [],
                [states["step"]],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            out.copy_(master)

    def _scale(self, gradient: Tensor, factor: float, size: int) -> Tensor:
        if gradient.dtype == torch.float32 and factor == 1.0:
            return gradient
        if len(self._scaled) < size:
            self._scaled = torch.empty(size)
        scaled = self._scaled[: len(gradient)].copy_(gradient)
        return scaled if factor == 1.0 else scaled.mul_(factor)
