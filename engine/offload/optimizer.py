"""The optimizer of a module whose fp32 states are offloaded: on the host or in files, a share on the device if asked.

ZeRO-Offload: Ren et al., 2021, arXiv:2101.06840; ZeRO-Infinity: Rajbhandari et al., 2021, arXiv:2104.07857. The module
keeps its shards in compute precision. What counts is the fp32 master of each: steps, checkpoints and averages are made
of those.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine import optim
from engine.config import EngineConfig, OptimizerConfig
from engine.host_allocator import give_memory_back
from engine.loading import also_into
from engine.offload.gradients import Gradients, Kept, Streamed, take
from engine.offload.layout import lay_out
from engine.offload.stores import FileStore, MemoryStore, Store
from engine.offload.tier import AVERAGE, MASTER, Shard, Tier
from engine.offload.together import together
from engine.parallel import dtensors


class OffloadedOptimizer:
    """An optimizer over the module's trainable parameters, with gradients that it takes as they come."""

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        engine: EngineConfig,
        *,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """Make room for all states; masters have no values before `filling`. Raises OSError where there is no room.

        `let_go` is called after each sub-group whose shards were written.
        """
        if config.name.lower() == "onebitadam":
            raise ValueError("onebitadam keeps whole momenta on every device: offload_optimizer=none, or adamw")
        self._lean = engine.offload_optimizer == "nvme"
        if self._lean:
            give_memory_back()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        parts = optim.parts([p for _, p in named], config)
        stand_ins = [([nn.Parameter(torch.zeros(1))], decay) for _, decay in parts]
        self._torch = optim.over(stand_ins, config)
        group = {id(p): index for index, (members, _) in enumerate(parts) for p in members}
        shards = [Shard(name, p, group[id(p)]) for name, p in named]
        here, away = _split(shards, engine.offload_ratio)
        kinds = optim.kinds(config)
        self.tiers = [_tier(part, kinds, engine, on_device=part is here) for part in (here, away) if part]
        for tier in self.tiers:
            tier.let_go = let_go
        self._places = {shard.name: (tier, n) for tier in self.tiers for n, shard in enumerate(tier.shards)}
        self._factor = 1.0
        self._decay: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Rates and the like, by group of parameters; the parameters themselves are not in it."""
        return self._torch.param_groups

    @contextmanager
    def filling(self) -> Iterator[None]:
        """What `engine.loading` writes into the module within this block is written into the masters as well.

        A parameter that is filled by other means has its master taken from it afterwards, in its own precision.
        """
        written: set[str] = set()

        def keep(name: str) -> Any:
            def master(values: Tensor) -> None:
                written.add(name)
                tier, number = self._places[name]
                tier.store.write(MASTER, number, values)

            return master

        shards = [shard for tier in self.tiers for shard in tier.shards]
        with also_into({id(shard.parameter): keep(shard.name) for shard in shards}):
            yield
        for tier in self.tiers:
            for number, shard in enumerate(tier.shards):
                if shard.name not in written:
                    tier.store.write(MASTER, number, shard.flat)
                take(shard.parameter, number, tier.gradients)
        if self._lean:
            give_memory_back()

    # What a step asks of gradients and optimizer

    def squared_norm(self) -> float:
        """The sum of squares of the step's gradients, the same number on every rank."""
        numbers = [found for tier in self.tiers for found in tier.squared_sums()]
        return dtensors.sum_over_parts(numbers)

    def scale(self, factor: float) -> None:
        """Multiply the step's gradients, when they are used."""
        self._factor = factor

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient, and of the averages."""
        for tier in self.tiers:
            tier.step(self._torch, self._factor, self._decay)

    def zero_grad(self) -> None:
        """Forget the step's gradients."""
        self._factor = 1.0
        for tier in self.tiers:
            tier.gradients.clear()

    def forget(self, names: Collection[str]) -> None:
        """Have no gradient of these parameters."""
        for name in names:
            tier, number = self._places[name]
            tier.gradients.forget(number)

    def settle(self) -> None:
        """Until everything written to files is in them. Raises OSError where something is not."""
        for tier in self.tiers:
            tier.store.settle()

    # Averages

    @torch.no_grad()
    def start_averaging(self, decay: float) -> None:
        """Keep an exponential moving average of the masters beside them."""
        self._decay = decay
        for tier in self.tiers:
            tier.start_averaging()

    @torch.no_grad()
    def show(self, kind: str) -> None:
        """Put the masters ("parameter") or the averages ("average") into the module, in its precision."""
        for tier in self.tiers:
            tier.show(kind)

    # Checkpoints

    def states(self) -> Iterator[tuple[str, Tier, int, str]]:
        """Every state that has values: (kind.name, its tier, the shard's number there, kind)."""
        for name, (tier, number) in self._places.items():
            kinds = [MASTER, *(tier.kinds if tier.begun[number] else ())]
            for kind in [*kinds, *((AVERAGE,) if self._decay is not None else ())]:
                yield f"{kind}.{name}", tier, number, kind

    def numbers(self) -> dict[str, float]:
        """The optimizer's numbers a parameter, by kind.name."""
        found: dict[str, float] = {}
        for tier in self.tiers:
            for piece, numbers in tier.numbers.items():
                for kind, value in numbers.items():
                    if isinstance(value, Tensor):
                        found[f"{kind}.{tier.shards[piece.parameter].name}"] = value.item()
        return found

    def make_room(self, names: Sequence[str], numbers: dict[str, float]) -> None:
        """Be as the optimizer was that had states `names` (kind.name) and these numbers."""
        begun = {name.partition(".")[2] for name in [*names, *numbers]}
        for tier in self.tiers:
            tier.begun = [shard.name in begun for shard in tier.shards]
            tier.numbers = {
                piece: self._numbers_of(tier.shards[piece.parameter].name, numbers, tier.device)
                for group in tier.store.layout.groups
                for piece in group.pieces
                if tier.begun[piece.parameter]
            }

    def _numbers_of(self, name: str, numbers: dict[str, float], device: torch.device) -> dict[str, Tensor]:
        """The fused optimizers keep them where they step, the others on the host."""
        place = device if self._torch.defaults.get("fused") else torch.device("cpu")
        mine = {key.partition(".")[0]: number for key, number in numbers.items() if key.partition(".")[2] == name}
        return {kind: torch.tensor(number, dtype=torch.float32, device=place) for kind, number in mine.items()}

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of masters, moments and averages, by where they are: device, host, nvme.

        The step's gradients are with those on the host, and apart ("gradients") on a device.
        """
        found = {"device": 0, "gradients": 0, "host": 0, "nvme": 0}
        for tier in self.tiers:
            if isinstance(tier.store, FileStore):
                found["nvme"] += tier.store.bytes
                found["host"] += tier.store.buffer_bytes + tier.gradients.bytes
                continue
            assert isinstance(tier.store, MemoryStore)
            on_host = tier.store.device.type == "cpu"
            found["host" if on_host else "device"] += tier.store.bytes
            found["host" if on_host else "gradients"] += tier.gradients.bytes
        return found


def full_precision(module: nn.Module) -> dict[str, Tensor]:
    """The values of a module that has some, by parameter, to be kept over its cast to compute precision."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}


def _split(shards: list[Shard], ratio: float) -> tuple[list[Shard], list[Shard]]:
    """(on the device, offloaded). The first of the module stay: their gradients come last, and would be waited for."""
    total, kept = sum(shard.parameter.numel() for shard in shards), 0
    for place, shard in enumerate(shards):
        kept += shard.parameter.numel()
        if kept > (1.0 - ratio) * total:
            return shards[:place], shards[place:]
    return shards, []


def _tier(shards: list[Shard], kinds: list[str], engine: EngineConfig, *, on_device: bool) -> Tier:
    layout = lay_out([shard.flat.numel() for shard in shards], engine.sub_group_size)
    device = dtensors.local(shards[0].parameter).device
    stays = on_device or device.type == "cpu"
    gradients: Gradients = Kept() if stays else Streamed(layout)
    store: Store
    if on_device:
        store = MemoryStore(layout, [MASTER, *kinds], device)
    elif engine.offload_optimizer == "cpu":
        store = MemoryStore(layout, [MASTER, *kinds], torch.device("cpu"))
    else:
        store = together(lambda: FileStore(layout, [MASTER, *kinds], engine.nvme_path))
    return Tier(shards, store, gradients, kinds, device if on_device else torch.device("cpu"))
