"""A model whose pieces lie on the ranks of a pipeline, whole and plain while text is generated: what the flip reads."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.rollout.twin.origins import on_meta, plain, slots


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
        on_meta(self.module)

    @contextmanager
    def filled(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Within the block the module has these values, under the names of what is trained."""
        for name, whole in named:
            inside = name.removeprefix(f"{self._path}.") if self._path else name
            # Not frozen: whoever reads it has to look at it anew each time.
            parameter = nn.Parameter(whole.to(self._dtype), requires_grad=True)
            for owner, leaf in self._places.get(inside, []):
                owner._parameters[leaf] = parameter
        try:
            yield
        finally:
            on_meta(self.module)
