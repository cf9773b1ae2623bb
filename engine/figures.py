"""Numbers that a device computed, read on the host."""

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from engine.parallel import dist

Tree = TypeVar("Tree")


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Each as a number. The host waits for the device once for all of them, not once each."""
    tensors = [value.detach().to(dist.world().device, torch.float64) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


def detached(metrics: Mapping[str, float | Tensor]) -> dict[str, float | Tensor]:
    """Figures that hold nothing of the pass they come from."""
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def on_host(tree: Tree) -> Tree:
    """Lists, tuples and dictionaries with their tensors on the host, fetched together: one wait a type of numbers."""
    leaves, form = tree_flatten(tree)
    afar = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    for dtype in dict.fromkeys(leaves[place].dtype for place in afar):
        places = [place for place in afar if leaves[place].dtype == dtype]
        found = torch.cat([leaves[place].detach().flatten() for place in places]).cpu()
        for place, part in zip(places, found.split([leaves[place].numel() for place in places]), strict=True):
            leaves[place] = part.view(leaves[place].shape)
    return cast(Tree, tree_unflatten(leaves, form))
