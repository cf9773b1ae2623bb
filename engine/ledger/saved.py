"""What a forward keeps for backward: the tensors that autograd saves, parameters left out, each storage once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engine.parallel import dtensors


class Saved:
    """Counts within `watching`; `bytes` after it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._kept: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Recomputed blocks count with their inputs: what is saved inside of them goes another way."""
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def settle(self, own: Iterable[Tensor]) -> None:
        """Count what was kept and is there still; `own` are tensors that have another owner."""
        others = {storage(tensor) for tensor in own}
        sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in self._kept}
        self.bytes = sum(size for place, size in sizes.items() if place not in others)
        self._kept.clear()

    def _keep(self, tensor: Tensor) -> Tensor:
        alone = tensor.detach()  # an output that is kept by its own node would hold itself
        self._kept.append(dtensors.local(alone))
        return alone


def storage(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    return tensor.untyped_storage()._cdata
