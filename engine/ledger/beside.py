"""What an engine holds beside its module's parameters and gradients: optimizer, twin, cache, host buffers, files."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.average import Average
from engine.ledger.saved import storage
from engine.parallel import dtensors, zero


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


def generator_bytes(flip: Any, module: nn.Module) -> dict[str, int]:
    """The twin's own copies of weights, those that are packed, and the key-value cache, of a flip that was entered."""
    twin, rollouts = getattr(flip, "_twin", None), getattr(flip, "_rollouts", None)
    live = {storage(dtensors.local(tensor)) for tensor in zero.sharded(module)}
    own = [p.detach() for p in twin.module.parameters() if not p.is_meta] if twin else []
    streamed = twin.stream.memory if twin and twin.stream else []
    slots = getattr(rollouts, "_slots", None)
    layers = [layer for cache in (slots.caches if slots else ()) for layer in cache.layers.values()]
    return {
        "twin": _size([*own, *streamed], live),
        "packs": slots.packs.bytes if slots else 0,
        "cache": _size([tensor for layer in layers for tensor in (layer.keys, layer.values)], set()),
    }


def average_bytes(average: Average) -> int:
    """The moving average of the parameters, where no offloaded optimizer keeps it."""
    return _size([dtensors.local(tensor) for tensor in average.tensors.values()], set())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(tensors: list[Tensor], others: set[int]) -> int:
    sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(count for place, count in sizes.items() if place not in others)
