"""What an engine holds beside its module's parameters and gradients: optimizer, twin, cache, host buffers, files."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.ledger.saved import storage
from engine.optimizers.ema import Average
from engine.parallel import dtensors, zero

if TYPE_CHECKING:
    from engine.generation.flip import Flip


def optimizer_bytes(optimizer: Any) -> dict[str, int]:
    """Moments by where they are; an offloaded optimizer's masters are with them, and gradients that it has taken."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = dict(getattr(optimizer, "bytes", {}))
        return {"optimizer": found.pop("device", 0), **found}
    values = (value for state in optimizer.state.values() for value in state.values())
    states = [dtensors.local(value) for value in values if _is_tensor(value)]
    return {"optimizer": _size(states, set())}


def generator_bytes(flip: "Flip", module: nn.Module) -> dict[str, int]:
    """The twin's own copies of weights, those that are packed, and the key-value cache, of a flip that was entered."""
    weights, cache, packs = flip.held()
    live = {storage(dtensors.local(tensor)) for tensor in zero.sharded(module)}
    return {"twin": _size(weights, live), "packs": packs, "cache": _size(cache, set())}


def average_bytes(average: Average) -> int:
    """The moving average of the parameters, where no offloaded optimizer keeps it."""
    return _size([dtensors.local(tensor) for tensor in average.tensors.values()], set())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(tensors: list[Tensor], others: set[int]) -> int:
    sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(count for place, count in sizes.items() if place not in others)
