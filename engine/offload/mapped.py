"""Parameter shards in a file (ZeRO-3): mapped into memory, read ahead of the units that need them, let go after.

FSDP2 gathers a unit from its shards, wherever their memory is. Here that memory is a private file's mapping. A unit
asks the system to read the next units' part while it computes, and gives its own part back when it is done; what stays
in the page cache costs nobody anything. After a step the changed pages are written back behind the next forward, and
the next step waits for that and hears of errors.

Left out: a shard that FSDP2 pads (a rank with fewer rows than the others) stays in host memory, where FSDP2 puts it.
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.offload.blocks import BLOCK_BYTES, whole_bytes
from engine.offload.files import PrivateFile, workers
from engine.parallel import dist, dtensors, zero

AHEAD = 2  # units


class MappedShards:
    """The shards of a module that FSDP2 has laid out, moved into a file."""

    def __init__(self, module: nn.Module, folder: str | None) -> None:
        """Values that there are are kept; meta parameters get room. Raises OSError where there is no room on disk."""
        blocks = zero.units(module)
        self._spans: list[tuple[int, int]] = []  # bytes of each block's shards; the root's come first
        places: dict[str, int] = {}
        end = 0
        names = {id(p): name for name, p in module.named_parameters()}
        inside = {id(p) for block in blocks for p in block.parameters()}
        root = [p for p in module.parameters() if id(p) not in inside]
        for members in [root, *(list(block.parameters()) for block in blocks)]:
            start = end
            for parameter in members:
                if _even(parameter) and names[id(parameter)] not in places:
                    places[names[id(parameter)]] = end
                    size = dtensors.local(parameter.detach()).numel() * parameter.element_size()
                    end += whole_bytes(size)
            self._spans.append((start, end))
        self.bytes = end
        self._file = PrivateFile(folder, max(end, BLOCK_BYTES))
        self._memory, self._pages = self._file.mapping(0, self._file.size, torch.uint8)
        self._flushing: Future[Any] | None = None
        self._move(module, {id(p): places[name] for name, p in module.named_parameters() if name in places})
        for number, block in enumerate(blocks):
            self._watch(block, number + 1)

    def let_go(self) -> None:
        """Give back all memory that shards take; they are read again where they are needed."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def written(self) -> None:
        """Shards have changed: begin to write them back."""
        self.settle()
        self._flushing = workers().submit(self._pages.flush)

    def settle(self) -> None:
        """Until everything is written back. Raises OSError where something could not be."""
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()

    @torch.no_grad()
    def _move(self, module: nn.Module, places: dict[int, int]) -> None:
        computes = dist.world().device

        def moved(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                return tensor.to(computes)
            here = torch.empty_like(tensor, device="cpu") if tensor.is_meta or id(tensor) in places else tensor
            if id(tensor) in places:
                local = dtensors.local(here)
                start = places[id(tensor)]
                room = self._memory[start : start + local.numel() * local.element_size()]
                room = room.view(local.dtype).view(local.shape)
                local.set_(room.untyped_storage(), room.storage_offset(), room.shape, room.stride())
                if not tensor.is_meta:
                    local.copy_(dtensors.local(tensor))
            return here

        module._apply(moved)  # FSDP2 takes note of new shards there

    def _watch(self, block: nn.Module, number: int) -> None:
        def before(*_: Any) -> None:
            self._read(range(number + 1, number + 1 + AHEAD))

        def after(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._give_back(number)
            for output in outputs if isinstance(outputs, Sequence) else [outputs]:
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(backward)

        def backward(_gradient: Tensor) -> None:
            """The block's backward begins: FSDP2 has its shards, and gathers the block before it."""
            self._give_back(number)
            self._give_back(number + 1)
            self._read(range(number - 1 - AHEAD, number - 1))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    def _read(self, numbers: range) -> None:
        for number in numbers:
            if 0 <= number < len(self._spans):
                self._advise(mmap.MADV_WILLNEED, number)

    def _give_back(self, number: int) -> None:
        if number < len(self._spans):
            self._advise(mmap.MADV_DONTNEED, number)

    def _advise(self, what: int, number: int) -> None:
        start, stop = self._spans[number]
        if stop > start:
            self._pages.madvise(what, start, stop - start)


def _even(parameter: Tensor) -> bool:
    """Whether FSDP2 takes this rank's shard as it is: as many rows as any rank's."""
    if not isinstance(parameter, DTensor):
        return True
    most = list(parameter.shape)
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            most[placement.dim] = -(-most[placement.dim] // parameter.device_mesh.size(dim))  # type: ignore[attr-defined]
    return list(dtensors.local(parameter.detach()).shape) == most
