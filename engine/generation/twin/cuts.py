"""What of each parameter a rank holds where several ranks generate together (tensor parallelism for inference).

The twin is split by the plan that splits modules in training (`engine/parallel/tensor.py`); what is left here is where
a rank's part lies in the whole, so that the gather can put it there without the whole ever being in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.parallel import dist, dtensors, tensor


@dataclass(frozen=True)
class Cut:
    """Part `index` of `count` equal parts of a dimension, taken of each of `pieces` matrices that lie side by side."""

    dim: int
    count: int
    index: int
    pieces: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor; not a copy where there is one piece."""
        share = whole.shape[self.dim] // (self.pieces * self.count)
        parts = [piece.narrow(self.dim, self.index * share, share) for piece in whole.chunk(self.pieces, self.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def place(self, rows: Tensor, first: int, target: Tensor) -> None:
        """Put what this part has of `rows` of the whole, from row `first` on, into `target`, the part."""
        if self.dim > 0:
            target[first : first + len(rows)].copy_(self.of(rows))
            return
        assert self.pieces == 1, "matrices side by side are cut within, not over them"
        begin = self.index * len(target)
        low, high = max(first, begin), min(first + len(rows), begin + len(target))
        if low < high:
            target[low - begin : high - begin].copy_(rows[low - first : high - first])


def split(module: nn.Module, ranks: int, plan: Mapping[str, str] | None) -> dict[str, Cut]:
    """Split a module on the meta device over every `ranks` neighbouring ranks, in place; the cut of each parameter.

    `plan` says how, by default the one that came with the module. Raises ValueError where it can't be split.
    """
    mesh = dist.neighbours(ranks)
    tensor.parallelize(module, plan or tensor.plan_of(module), mesh)
    cuts = {}
    for path, owner in module.named_modules():
        for leaf, parameter in list(owner._parameters.items()):
            if isinstance(parameter, DTensor):
                placement: Any = parameter.placements[0]
                pieces = getattr(placement, "split_factor", 1)
                cuts[f"{path}.{leaf}"] = Cut(placement.dim, mesh.size(), mesh.get_local_rank(), pieces)
                owner._parameters[leaf] = nn.Parameter(dtensors.local(parameter.detach()), requires_grad=False)
    return cuts
