"""Generating with a model that does not fit: a block has its parameters only while it runs.

Two stretches of memory of a block's size take turns. While one block computes for the whole batch, the next one's
parameters are gathered into the other stretch by a thread. So what a forward costs is the larger of computing and of
reading all parameters once, and a larger batch makes a token cheaper (Sheng et al., 2023, "FlexGen").

Gathers are collective where parameters are sharded: a rank whose prompts are answered takes part in the others' until
all are done.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation.twin.gather import Piece, gather
from engine.parallel import dist, dtensors, zero

ALIGNED = 64  # bytes


class BlockStream:
    """The blocks of a module, whose parameters come and go; `wanted` says from where.

    Blocks run once a forward, in order.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = zero.units(module)
        self.prefixes = {path: at for path, child in module.named_modules() for at in self._place(child)}
        self._module, self._dtype, self._device = module, dtype, device
        self._pieces: list[list[Piece]] = [[] for _ in self.blocks]
        self._parameters: list[list[tuple[nn.Module, str, nn.Parameter]]] = [[] for _ in self.blocks]
        self.memory: list[Tensor] = []
        self._coming: dict[int, Future[None]] = {}
        self._collective = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocks")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        module.register_forward_pre_hook(self._meet)
        for index, block in enumerate(self.blocks):
            block.register_forward_pre_hook(partial(self._before, index))
            block.register_forward_hook(partial(self._after, index))

    def block_of(self, name: str) -> int | None:
        """Which block a parameter belongs to."""
        return next((at for prefix, at in self.prefixes.items() if name.startswith(f"{prefix}.")), None)

    def serve(self, wanted: Mapping[str, Piece]) -> None:
        """Take these parameters from where the pieces say; of their targets the shapes count, not the memory."""
        by_block: list[list[tuple[str, Piece]]] = [[] for _ in self.blocks]
        for name, piece in wanted.items():
            index = self.block_of(name)
            assert index is not None
            by_block[index].append((name, piece))
        largest = max((sum(_aligned(p.target, self._dtype) for _, p in block) for block in by_block), default=0)
        if not self.memory or len(self.memory[0]) < largest:
            self.memory = []
            self.memory = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for index, block in enumerate(by_block):
            self._lay_out(index, block)
        self._collective = dist.world().size > 1 and any(not dtensors.is_whole(p.live) for p in wanted.values())

    def finish(self) -> None:
        """Take part in what other ranks gather, until none generates any more. Collective."""
        while self._collective and dist.max_over_ranks(0.0) > 0:
            for index in range(len(self.blocks)):
                self._load(index).result()

    def release(self) -> None:
        """Give the memory back."""
        self._drain()
        self.memory = []
        self._pieces = [[] for _ in self.blocks]
        self._parameters = [[] for _ in self.blocks]
        self._collective = False

    def _place(self, child: nn.Module) -> list[int]:
        return [at for at, block in enumerate(self.blocks) if block is child]

    def _lay_out(self, index: int, block: Sequence[tuple[str, Piece]]) -> None:
        """Where a block's parameters lie in the stretch that is its own."""
        memory, at = self.memory[index % 2], 0
        self._pieces[index], self._parameters[index] = [], []
        for name, piece in block:
            shape, size = piece.target.shape, piece.target.numel() * self._dtype.itemsize
            target = memory[at : at + size].view(self._dtype).view(shape)
            at += _aligned(piece.target, self._dtype)
            path, _, leaf = name.rpartition(".")
            self._pieces[index].append(Piece(piece.live, piece.adapter, target, piece.cut))
            entry = (self._module.get_submodule(path), leaf, nn.Parameter(target, requires_grad=False))
            self._parameters[index].append(entry)

    def _meet(self, *_: Any) -> None:
        """Before a forward: say that there is one, so that ranks without work take part."""
        self._drain()
        if self._collective:
            dist.max_over_ranks(1.0)

    def _before(self, index: int, *_: Any) -> None:
        coming = self._coming.pop(index, None) or self._load(index)
        coming.result()
        for owner, leaf, parameter in self._parameters[index]:
            owner._parameters[leaf] = parameter
        if index + 1 < len(self.blocks):
            self._coming[index + 1] = self._load(index + 1)

    def _after(self, index: int, *_: Any) -> None:
        for owner, leaf, parameter in self._parameters[index]:
            owner._parameters[leaf] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    def _load(self, index: int) -> "Future[None]":
        """Gather a block's parameters; the stretch's last reader has been started already."""
        read = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        return self._thread.submit(self._gather, index, read)

    def _gather(self, index: int, read: "torch.cuda.Event | None") -> None:
        if self._stream is None:
            gather(self._pieces[index])
            return
        with torch.cuda.stream(self._stream):
            assert read is not None
            self._stream.wait_event(read)
            gather(self._pieces[index])
            self._stream.synchronize()

    def _drain(self) -> None:
        """Wait for what a forward that failed left on its way."""
        for coming in self._coming.values():
            coming.result()
        self._coming.clear()


def _aligned(tensor: Tensor, dtype: torch.dtype) -> int:
    return -(-tensor.numel() * dtype.itemsize // ALIGNED) * ALIGNED
