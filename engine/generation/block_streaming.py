"""Block streaming: generate with a model that is larger than the memory of the device.

A block has parameters only while it runs. There are two buffers, each as large as the largest block. While one block
computes for the batch, a thread gathers the parameters of the next block into the other buffer. A forward costs the
larger of computing and of reading all parameters once, so a larger batch lowers the cost of a token (Sheng et al.,
2023, "FlexGen", arXiv:2303.06865).

Gathering sharded parameters is collective. A rank without remaining prompts joins the forwards of the other ranks.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation.weight_sync import LiveParameter, aligned_bytes, copy_weight, divide_memory
from engine.host_memory import allocate
from engine.parallel import dist, dtensors, zero


class BlockStream:
    """The blocks of a module, which have parameters only while they run. A forward runs all blocks once, in order."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = zero.units(module)
        self.memory: list[Tensor] = []
        self._paths = {path: self.blocks.index(child) for path, child in module.named_modules() if child in self.blocks}
        self._module, self._dtype, self._device = module, dtype, device
        # Of each block: live parameter, owner, name in the owner, and the parameter in memory.
        self._parameters: list[list[tuple[LiveParameter, nn.Module, str, nn.Parameter]]] = [[] for _ in self.blocks]
        self._loading: dict[int, Future[None]] = {}
        self._collective = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A new thread uses GPU 0. If its rank has another one, leaving the stream would create a context on GPU 0.
        use_device = None if self._stream is None else partial(torch.cuda.set_device, device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocks", initializer=use_device)
        module.register_forward_pre_hook(self._before_forward)
        for index, block in enumerate(self.blocks):
            block.register_forward_pre_hook(partial(self._before_block, index))
            block.register_forward_hook(partial(self._after_block, index))

    def block_of(self, name: str) -> int | None:
        """Return the index of the block that a parameter belongs to."""
        return next((index for path, index in self._paths.items() if name.startswith(f"{path}.")), None)

    def start(self, live: Mapping[str, LiveParameter]) -> None:
        """Prepare to copy these parameters of the blocks while blocks run."""
        names: list[list[str]] = [[] for _ in self.blocks]
        for name in live:
            index = self.block_of(name)
            assert index is not None, f"{name} belongs to no block"
            names[index].append(name)
        shapes = [[self._module.get_parameter(name).shape for name in block] for block in names]
        largest = max((aligned_bytes(of_block, self._dtype) for of_block in shapes), default=0)
        if not self.memory or len(self.memory[0]) < largest:
            self.memory = []  # free the old memory before the new is allocated
            self.memory = [allocate(largest, self._device) for _ in range(2)]
        for index, block in enumerate(names):
            self._parameters[index] = []
            targets = divide_memory(self.memory[index % 2], shapes[index], self._dtype)
            for name, target in zip(block, targets, strict=True):
                owner, _, leaf = name.rpartition(".")
                parameter = nn.Parameter(target, requires_grad=False)
                self._parameters[index].append((live[name], self._module.get_submodule(owner), leaf, parameter))
        sharded = any(not dtensors.is_full(each.parameter) for each in live.values())
        self._collective = dist.world().size > 1 and sharded

    def finish(self) -> None:
        """Take part in the gathers of other ranks' forwards until no rank generates. Collective."""
        while self._collective and dist.max_over_ranks(0.0) > 0:
            for index in range(len(self.blocks)):
                self._load(index).result()

    def release(self) -> None:
        """Free the memory."""
        self._wait()
        self.memory = []
        self._parameters = [[] for _ in self.blocks]
        self._collective = False

    def _before_forward(self, *_: Any) -> None:
        """Signal the start of a forward, so that ranks without prompts take part in its gathers."""
        self._wait()
        if self._collective:
            dist.max_over_ranks(1.0)

    def _before_block(self, index: int, *_: Any) -> None:
        (self._loading.pop(index, None) or self._load(index)).result()
        for _live, owner, leaf, parameter in self._parameters[index]:
            owner._parameters[leaf] = parameter
        if index + 1 < len(self.blocks):
            self._loading[index + 1] = self._load(index + 1)

    def _after_block(self, index: int, *_: Any) -> None:
        for _live, owner, leaf, parameter in self._parameters[index]:
            owner._parameters[leaf] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    def _load(self, index: int) -> "Future[None]":
        """Start to gather a block's parameters, on GPUs after the work that reads the buffer."""
        read = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        return self._thread.submit(self._gather, index, read)

    def _gather(self, index: int, read: "torch.cuda.Event | None") -> None:
        with torch.cuda.stream(self._stream):  # None: does nothing
            if self._stream is not None and read is not None:
                self._stream.wait_event(read)
            for live, _, _, parameter in self._parameters[index]:
                copy_weight(live, parameter)
            if self._stream is not None:
                self._stream.synchronize()

    def _wait(self) -> None:
        """Wait for blocks that a failed forward was loading."""
        for loading in self._loading.values():
            loading.result()
        self._loading.clear()
