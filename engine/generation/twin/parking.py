"""Optimizer states on the host while the device's memory is wanted for generating.

A state's storage on the device is given back and later taken again; the tensor stays the same object, so that the
optimizer, whole or sharded, notices nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.parallel import dtensors


@contextmanager
def parked(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block the states that an optimizer keeps on an accelerator are in host memory."""
    states = [
        dtensors.local(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim > 0
    ]
    with on_host([state for state in states if state.device.type != "cpu"]):
        yield


@contextmanager
def on_host(tensors: list[Tensor]) -> Iterator[None]:
    """Within the block these tensors have no memory of their own; their values wait on the host."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
    kept = [(storage, _copied(storage)) for storage in storages.values()]
    if any(storage.device.type == "cuda" for storage in storages.values()):
        torch.cuda.synchronize()
    for storage, _ in kept:
        storage.resize_(0)
    try:
        yield
    finally:
        for storage, copy in kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        if any(storage.device.type == "cuda" for storage in storages.values()):
            torch.cuda.synchronize()


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy in host memory, pinned where the device can then copy by itself."""
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    return copy.copy_(storage, non_blocking=True)
