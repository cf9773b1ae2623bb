"""Measure the bytes that each owner holds (parameters, optimizer, activations, cache, ...) at the peak of each phase.

The tracker counts the storages of live tensors, so that a GPU and a CPU report the same figures. Short-lived buffers
inside kernels and reductions (blocks of logits, communication buffers) are not counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from engine.parallel import dtensors, zero

if TYPE_CHECKING:
    from engine.generation.flip import Flip

SAMPLED_FIRST, SAMPLED_EVERY = 2, 50  # the updates that are sampled: the first two, and every fiftieth


class MemoryTracker:
    """Sample the bytes of one engine.

    `peaks[phase][owner]` is the largest sample, in bytes. The phases are "train", "score" and "generate". `waiting`
    holds the bytes of forwards that wait for their backward (`Engine.score_to_learn`).

    `other_owners` returns the bytes of owners other than the module. `offloaded` maps an owner to "host" or "nvme" if
    its tensors are offloaded. `hooks` is False if hooks would recompile compiled blocks.
    """

    def __init__(
        self,
        module: nn.Module,
        other_owners: Callable[[], Mapping[str, int]],
        *,
        offloaded: Mapping[str, str] | None = None,
        hooks: bool = True,
    ) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self.waiting: dict[str, int] = {}
        self._module, self._other_owners = module, other_owners
        self._offloaded, self._hooks = offloaded or {}, hooks
        self._saved = WeakTensorKeyDictionary()  # only the autograd graph keeps a saved tensor alive
        self._updates = self._scorings = 0
        self._is_sampled = False

    def start_update(self) -> None:
        """Decide whether the coming update is sampled."""
        self._is_sampled = self._updates < SAMPLED_FIRST or self._updates % SAMPLED_EVERY == 0
        self._updates += 1

    def training(self) -> AbstractContextManager[None]:
        """Return the context of a forward that trains: sample its gathered parameters and its activations."""
        return self._forward("train") if self._is_sampled and self._hooks else nullcontext()

    def scoring(self) -> AbstractContextManager[None]:
        """Return the context of a scoring pass: sample the first ones."""
        self._scorings += 1
        return self._forward("score") if self._scorings <= SAMPLED_FIRST and self._hooks else nullcontext()

    def after_backward(self) -> None:
        """Sample the gradients of a micro-batch."""
        if self._is_sampled:
            self.sample("train")

    def sample_waiting(self) -> None:
        """Sample the bytes of forwards that wait for their backward."""
        if self._is_sampled:
            sizes = {"gathered": self._gathered(), "activations": self._activations()}
            self.waiting = {owner: max(size, self.waiting.get(owner, 0)) for owner, size in sizes.items()}

    def sample(self, phase: str) -> None:
        """Count the bytes of every owner now."""
        self._note(phase, {**self.holdings(), "activations": self._activations()})

    def holdings(self) -> dict[str, int]:
        """Return the bytes of every owner now, without activations."""
        sizes = {
            "parameters": storage_bytes([*zero.sharded(self._module), *zero.packed_weights(self._module)]),
            "gathered": self._gathered(),
            "gradients": storage_bytes(zero.gradients(self._module)),
        }
        totals = Counter[str]()
        for owner, size in [*sizes.items(), *self._other_owners().items()]:
            totals[self._offloaded.get(owner, owner)] += size
        return {owner: size for owner, size in totals.items() if size}

    @contextmanager
    def _forward(self, phase: str) -> Iterator[None]:
        """Sample gathered parameters before each FSDP unit, and everything at the end."""
        units = [*zero.units(self._module), *zero.outer_layers(self._module)]
        handles = [
            u.register_forward_pre_hook(lambda *_: self._note(phase, {"gathered": self._gathered()})) for u in units
        ]
        try:
            with saved_tensors_hooks(self._save, lambda saved: saved):
                yield
        finally:  # a pipeline stage leaves its forward by an exception
            for handle in handles:
                handle.remove()
            self.sample(phase)

    def _save(self, tensor: Tensor) -> Tensor:
        saved = tensor.detach()  # a node that saves its own output would keep itself alive
        self._saved[saved] = None
        return saved

    def _activations(self) -> int:
        """Return the bytes that autograd holds for backward. Of a recomputed block, only the input counts."""
        parameters = [*zero.gathered(self._module), *zero.sharded(self._module)]
        return storage_bytes(list(self._saved), without=parameters)

    def _gathered(self) -> int:
        """Return the bytes of gathered parameters that are not the shards themselves."""
        return storage_bytes(zero.gathered(self._module), without=zero.sharded(self._module))

    def _note(self, phase: str, sizes: Mapping[str, int]) -> None:
        peaks = self.peaks.setdefault(phase, {})
        for owner, size in sizes.items():
            if size or owner in peaks:
                peaks[owner] = max(size, peaks.get(owner, 0))


def optimizer_bytes(optimizer: Any) -> dict[str, int]:
    """Return the bytes of moments by owner. An offloaded optimizer counts masters and received gradients as well."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        sizes = dict(getattr(optimizer, "bytes", {}))
        return {"optimizer": sizes.pop("device", 0), **sizes}
    values = (value for state in optimizer.state.values() for value in state.values())
    return {"optimizer": storage_bytes(value for value in values if isinstance(value, Tensor))}


def generator_bytes(flip: "Flip", module: nn.Module) -> dict[str, int]:
    """Return the bytes of the inference model's own weights, of its prepacked linears, and of the key-value cache."""
    weights, cache, packs = flip.memory()
    own = storage_bytes(weights, without=zero.sharded(module))
    return {"inference_model": own, "prepacked_linears": packs, "cache": storage_bytes(cache)}


@torch.no_grad()  # autograd would record each access to a parameter, at five times the cost
def storage_bytes(tensors: Iterable[Tensor], *, without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the storages of local shards, each counted once, without the storages of `without`."""
    storages = [dtensors.local(tensor).untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in without:
        sizes.pop(dtensors.local(tensor).untyped_storage().data_ptr(), None)
    return sum(sizes.values())
