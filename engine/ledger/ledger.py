"""The ledger of one engine: bytes by owner at the height of each phase of its steps.

Sampled on the first updates and now and then, in and after the forward of the first micro-batch (the largest), after
its backward, and at the end of generations and of the first scoring passes. Owners are counted from the tensors that
live, so that a figure is the same on a GPU and on a CPU; what kernels take for a moment (logits, buffers of a
reduction) is not seen.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.ledger.saved import Saved, storage
from engine.parallel import dtensors, zero

FIRST, EVERY = 2, 50  # updates that are sampled


@dataclass
class Ledger:
    """Counts an engine's bytes by owner.

    `heights` has the most that each owner had in each phase; `rest` counts what the module doesn't hold. `elsewhere`
    says of owners that are not on the device for which other owner they count: "host" or "nvme". `waiting` has what was
    there while forwards waited to be learned from (engine/shared_forward.py).
    """

    module: nn.Module
    rest: Callable[[], Mapping[str, int]]
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    watches: bool = True  # what forwards keep: off where blocks are compiled, which would be compiled again for it
    heights: dict[str, dict[str, int]] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    _updates: int = 0
    _scored: int = 0
    _due: bool = False

    def begin(self) -> None:
        """An update begins."""
        self._due = self._updates < FIRST or self._updates % EVERY == 0
        self._updates += 1

    def under_way(self, *, trains: bool) -> "UnderWay":
        """For passes of which several are kept at once, where they train."""
        return UnderWay(self, Saved() if trains and self._due and self.watches else None)

    @contextmanager
    def forward(self, *, first: bool) -> Iterator[None]:
        """The forward of a micro-batch runs within the block; the first of a sampled update is looked at."""
        if not (first and self._due and self.watches):
            yield
            return
        saved = Saved()
        with saved.watching(), self.gathering(first=first):
            yield
        self.kept(saved)

    def gathering(self, *, first: bool) -> AbstractContextManager[None]:
        """A forward that trains runs within the block, the first of its step or not."""
        return self._gathering("train") if first and self._due and self.watches else nullcontext()

    def kept(self, saved: Saved) -> None:
        """Count, with what forwards have kept until now."""
        saved.settle([*zero.gathered(self.module), *_shards(self.module)])
        self.sample("train", {"activations": saved.bytes})

    def waits(self, activations: int) -> None:
        """Forwards wait that keep so much."""
        for owner, count in {"gathered": size(self._copies(self._own())), "activations": activations}.items():
            self.waiting[owner] = max(count, self.waiting.get(owner, 0))

    def after_backward(self) -> None:
        """A micro-batch's gradients are there."""
        if self._due:
            self.sample("train")

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """A scoring pass runs within the block; the first ones are looked at."""
        self._scored += 1
        if self._scored > FIRST or not self.watches:
            yield
            return
        with self._gathering("score"):
            yield
        self.sample("score")

    def sample(self, phase: str, more: Mapping[str, int] | None = None) -> None:
        """Count; of each owner in a phase the most stays, as a prediction adds up what lives at the same time."""
        self._note(phase, {**self.holdings(), **(more or {})})

    def _note(self, phase: str, found: Mapping[str, int]) -> None:
        kept = self.heights.setdefault(phase, {})
        for owner, count in found.items():
            kept[owner] = max(count, kept.get(owner, 0))

    @contextmanager
    def _gathering(self, phase: str) -> Iterator[None]:
        """Within the block parameters are counted that are gathered for a unit and let go of behind it."""
        own = self._own()

        def note(*_: object) -> None:
            self._note(phase, {"gathered": size(self._copies(own))})

        handles = [unit.register_forward_pre_hook(note) for unit in zero.units(self.module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def holdings(self) -> dict[str, int]:
        """Bytes by owner now: parameters, gathered copies, gradients, and `rest`."""
        gradients = zero.gradients(self.module)
        own = {
            "parameters": size(_shards(self.module)),
            "gathered": size(self._copies(self._own())),
            "gradients": size(gradients),
        }
        found = Counter[str]()
        for owner, count in [*own.items(), *self.rest().items()]:
            found[self.elsewhere.get(owner, owner)] += count
        return {owner: count for owner, count in found.items() if count}

    def _own(self) -> set[int]:
        """The storages of the shards."""
        return {storage(tensor) for tensor in _shards(self.module)}

    @torch.no_grad()  # as in `_shards`
    def _copies(self, own: set[int]) -> list[Tensor]:
        """Gathered parameters that are not the shards themselves."""
        return [tensor for tensor in zero.gathered(self.module) if storage(tensor) not in own]


class UnderWay:
    """Forwards of a step up to the first backward, of which several are kept: most of them then."""

    def __init__(self, ledger: Ledger, saved: Saved | None) -> None:
        self._ledger, self._saved = ledger, saved

    def forward(self) -> AbstractContextManager[None]:
        """Around each forward."""
        return nullcontext() if self._saved is None else self._saved.watching()

    def height(self, *, waits: bool = False) -> None:
        """The first backward is about to begin, or is past; with `waits` something else is done before it."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._ledger.kept(saved)
            if waits:
                self._ledger.waits(saved.bytes)

    def forget(self) -> None:
        """The step is thrown away."""
        self._saved = None


def size(tensors: list[Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@torch.no_grad()  # autograd would note each look at a parameter, at five times its cost
def _shards(module: nn.Module) -> list[Tensor]:
    """What this rank keeps of the parameters between uses."""
    return [dtensors.local(tensor) for tensor in zero.sharded(module)]
