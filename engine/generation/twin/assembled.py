"""A model whose pieces lie on the ranks of a pipeline, whole and plain while text is generated: what the flip reads.

In the host's memory ranks of one host share it: there it is once, however many they are.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.generation.twin.origins import on_meta, plain, slots
from engine.parallel import dist, shared_memory

ALIGNED = 64  # bytes


class Assembled:
    """`module` is the model's architecture; it has values within `filled`, and no memory outside."""

    def __init__(self, blueprint: nn.Module, path: str, dtype: torch.dtype) -> None:
        """`path` is where the model stands in what is trained; `dtype` is the precision to generate in."""
        self.module, self._path, self._dtype = plain(copy.deepcopy(blueprint)), path, dtype
        found = slots(self.module)
        owners = {name: owner._parameters[leaf] for name, owner, leaf in found}
        self._places = {
            name: [(owner, leaf) for _, owner, leaf in found if owner._parameters[leaf] is parameter]
            for name, parameter in owners.items()
        }
        each = {id(parameter): parameter for parameter in owners.values()}.values()
        self._bytes = sum(_aligned(parameter.numel() * dtype.itemsize) for parameter in each if parameter is not None)
        on_meta(self.module)

    @contextmanager
    def filled(self, named: Iterable[tuple[str, Tensor]], *, on_host: bool) -> Iterator[None]:
        """Within the block the module has these values, under the names of what is trained, on the host or the device.

        Every rank passes the same ones in the same order.
        """
        shared = _Shared(self._bytes) if on_host else None
        for name, whole in named:
            places = self._places.get(name.removeprefix(f"{self._path}.") if self._path else name, [])
            if places:
                value = whole.to(self._dtype) if shared is None else shared.put(whole, self._dtype)
                # Not frozen: whoever reads it has to look at it anew each time.
                parameter = nn.Parameter(value, requires_grad=True)
                for owner, leaf in places:
                    owner._parameters[leaf] = parameter
        if on_host:
            dist.barrier()  # until all of it is written
        try:
            yield
        finally:
            on_meta(self.module)


class _Shared:
    """Memory for tensors one after another, that the ranks of one host share; where they can't, each has its own."""

    def __init__(self, size: int) -> None:
        self._memory, self._used = shared_memory.share(size), 0

    def put(self, whole: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor on the host; one rank writes it."""
        if self._memory is None:
            return whole.to("cpu", dtype)
        size = whole.numel() * dtype.itemsize
        place = self._memory[self._used : self._used + size].view(dtype).view(whole.shape)
        self._used += _aligned(size)
        if dist.world().leads:
            place.copy_(whole)
        return place


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
