"""The optimizer of a module whose fp32 states are on the CPU or on NVMe, optionally with a share on the device.

ZeRO-Offload: Ren et al., 2021, arXiv:2101.06840; ZeRO-Infinity: Rajbhandari et al., 2021, arXiv:2104.07857. The module
keeps its shards in compute precision. Steps, checkpoints and averages use the fp32 master weight of each shard.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine import optim
from engine.config import EngineConfig, OptimizerConfig
from engine.host_memory import return_freed_memory
from engine.internals import take_gradients
from engine.offload.states import States
from engine.offload.tier import AVERAGE, MASTER, Tier, TrainedShard
from engine.parallel import dtensors


class OffloadedOptimizer:
    """An optimizer over the trainable parameters of a module. It collects their gradients during backward."""

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        engine: EngineConfig,
        *,
        after_write: Callable[[], None] | None = None,
    ) -> None:
        """Allocate all states; `engine.loading` and `update_masters` set the master weights. Every rank calls.

        `after_write` is called whenever shards of a sub-group were written. Raises OSError if a disk is full.
        """
        self._is_nvme = engine.offload_optimizer == "nvme"
        if self._is_nvme:
            return_freed_memory()
        self.param_groups: list[dict[str, Any]] = [{"lr": config.lr}]
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        groups = optim.parameter_groups([p for _, p in named], config)
        decays = {id(p): decay for members, decay in groups for p in members}
        shards = [TrainedShard(name, p, decays[id(p)]) for name, p in named]
        on_device, offloaded = _split(shards, engine.offload_ratio)
        self.tiers: list[Tier] = []
        for members in filter(None, (on_device, offloaded)):
            device = dtensors.local(members[0].parameter).device if members is on_device else torch.device("cpu")
            states = States(
                [shard.flat.numel() for shard in members],
                engine.sub_group_size,
                device,
                nvme_path=engine.nvme_path,
                is_nvme=members is offloaded and self._is_nvme,
            )
            self.tiers.append(Tier(members, states, config, after_write))
        self._shards = {shard.name: (tier, n) for tier in self.tiers for n, shard in enumerate(tier.shards)}
        takers = {id(t.shards[n].parameter): partial(t.gradients.add, n) for t, n in self._shards.values()}
        take_gradients(module, takers)
        for tier, number in self._shards.values():
            vars(tier.shards[number].parameter)["write_master"] = partial(tier.states.write, MASTER, number)
        self._factor = 1.0
        self.average_weight: float | None = None  # of the parameters after a step in their average; None: no average

    @torch.no_grad()
    def update_masters(self) -> None:
        """Set the master weights of the shards that were initialized by other means than `engine.loading`.

        `engine.loading` writes to the master weights too, in full precision. Call this after the initialization.
        """
        for tier in self.tiers:
            tier.update_masters()
        if self._is_nvme:
            return_freed_memory()

    def squared_norm(self) -> float:
        """Return the sum of squares of the step's gradients, the same number on every rank."""
        return dtensors.sum_of_squares([norm for tier in self.tiers for norm in tier.gradient_norms()]).item()

    def scale(self, factor: float) -> None:
        """Multiply the step's gradients by `factor` during the step."""
        self._factor = factor

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, and the averages."""
        for tier in self.tiers:
            tier.step(self.param_groups[0]["lr"], self._factor, self.average_weight)

    def zero_grad(self) -> None:
        """Drop the step's gradients."""
        self._factor = 1.0
        for tier in self.tiers:
            tier.gradients.clear()

    def remove_gradients(self, names: Collection[str]) -> None:
        """Drop the gradients of these parameters."""
        for name in names:
            tier, number = self._shards[name]
            tier.gradients.sums.pop(number, None)

    @torch.no_grad()
    def start_averaging(self) -> None:
        """Maintain an average of the master weights. Set `average_weight` before each step."""
        self.average_weight = 1.0
        for tier in self.tiers:
            tier.start_averaging()

    @torch.no_grad()
    def write_to_module(self, kind: str) -> None:
        """Write the master weights ("parameter") or the averages ("average") into the module, in its precision."""
        for tier in self.tiers:
            tier.write_to_module(kind)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Return the states of each parameter by kind, as torch's optimizers do. They share memory with the tiers.

        Master weights, moments and averages are local shards. A parameter without a gradient has no moments yet.
        """
        averages = () if self.average_weight is None else (AVERAGE,)
        return {tier.shards[number].parameter: tier.state(number, averages) for tier, number in self._shards.values()}

    def allocate_states(self, names: Collection[str]) -> None:
        """Give exactly the named parameters moments and scalars to load into."""
        for tier in self.tiers:
            tier.allocate_scalars(names)

    @property
    def bytes(self) -> dict[str, int]:
        """Return the bytes of states by location: "device", "host", "nvme".

        "host" includes gradients and buffers there; "gradients" are those on a device.
        """
        found = {"device": 0, "gradients": 0, "host": 0, "nvme": 0}
        for tier in self.tiers:
            on_host = tier.states.device.type == "cpu"
            found["nvme" if tier.states.is_nvme else "host" if on_host else "device"] += tier.states.bytes
            found["host" if on_host else "gradients"] += tier.gradients.bytes
            found["host"] += tier.states.buffer_bytes
        return found


def _split(shards: list[TrainedShard], ratio: float) -> tuple[list[TrainedShard], list[TrainedShard]]:
    """Return (shards on the device, offloaded shards).

    The first shards of the module stay on the device: their gradients come last, so a transfer could not be hidden.
    """
    total, on_device = sum(shard.parameter.numel() for shard in shards), 0
    for number, shard in enumerate(shards):
        on_device += shard.parameter.numel()
        if on_device > (1.0 - ratio) * total:
            return shards[:number], shards[number:]
    return shards, []
