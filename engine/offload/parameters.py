"""Parameter shards on NVMe (ZeRO-3): a memory-mapped scratch file under the module that FSDP2 has sharded.

FSDP2 gathers a unit from its shards; here the memory of the shards is a mapping. Before a unit computes, its hook
requests the next units' shards from the disk. After it has computed, the hook releases the pages of its own shards.
After an optimizer step the changed pages are written in the background. The next step waits for this write.

A shard that FSDP2 pads (a rank with fewer rows than the others) stays in host memory, where FSDP2 puts it.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.offload.scratch_file import ScratchFile
from engine.parallel import dist, dtensors, zero

READ_AHEAD = 2  # units


class NvmeParameters:
    """Moves the shards of a module into `file`, and registers hooks that read ahead and release memory."""

    def __init__(self, module: nn.Module, folder: str | None) -> None:
        """Existing values are copied; meta parameters get memory. Raises OSError on all ranks if a disk is full."""
        blocks = zero.units(module)
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        root = [p for p in module.parameters() if id(p) not in in_blocks]
        offsets: dict[int, int] = {}
        self._ranges: list[tuple[int, int]] = []  # bytes of each unit's shards in the file; the root unit is first
        end = 0
        for members in [root, *(list(block.parameters()) for block in blocks)]:
            start = end
            for parameter in members:
                if id(parameter) not in offsets and _has_full_chunk(parameter):
                    offsets[id(parameter)] = end
                    size = dtensors.local(parameter.detach()).numel() * parameter.element_size()
                    end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            self._ranges.append((start, end))
        self.bytes = end
        self.file = ScratchFile(folder, end)
        self._move(module, offsets)
        for unit, block in enumerate(blocks, start=1):
            self._register_hooks(block, unit)

    @torch.no_grad()
    def _move(self, module: nn.Module, offsets: dict[int, int]) -> None:
        computes = dist.world().device

        def moved(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                return tensor.to(computes)
            if id(tensor) not in offsets:
                return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
            on_file = torch.empty_like(tensor, device="cpu")
            local, start = dtensors.local(on_file), offsets[id(tensor)]
            memory = self.file.bytes[start : start + local.numel() * local.element_size()]
            memory = memory.view(local.dtype).view(local.shape)
            local.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
            if not tensor.is_meta:
                local.copy_(dtensors.local(tensor))
            return on_file

        module._apply(moved)  # FSDP2 registers the new shards

    def _register_hooks(self, block: nn.Module, unit: int) -> None:
        def before_forward(*_: Any) -> None:
            self._read_ahead(range(unit + 1, unit + 1 + READ_AHEAD))

        def after_forward(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._release(unit)
            for output in outputs if isinstance(outputs, Sequence) else [outputs]:
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(before_backward)

        def before_backward(_gradient: Tensor) -> None:  # FSDP2 has gathered this unit, and gathers the previous one
            self._release(unit)
            self._release(unit + 1)
            self._read_ahead(range(unit - 1 - READ_AHEAD, unit - 1))

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def _read_ahead(self, units: range) -> None:
        for unit in units:
            if 0 <= unit < len(self._ranges):
                self.file.read_ahead(*self._ranges[unit])

    def _release(self, unit: int) -> None:
        if unit < len(self._ranges):
            self.file.release(*self._ranges[unit])


def _has_full_chunk(parameter: Tensor) -> bool:
    """Return whether this rank's shard has as many rows as any rank's, so that FSDP2 uses it without padding."""
    if not isinstance(parameter, DTensor):
        return True
    largest = list(parameter.shape)
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            largest[placement.dim] = -(-largest[placement.dim] // parameter.device_mesh.size(dim))  # type: ignore[attr-defined]
    return list(dtensors.local(parameter.detach()).shape) == largest
