"""The exponential moving average of the trained parameters (Polyak and Juditsky, 1992), sharded like them."""

import torch
from torch import Tensor, nn

from engine.offload import OffloadedOptimizer
from engine.parallel import dtensors


class Average:
    """The fp32 moving average of a module's trained parameters; empty until `start`.

    An offloaded optimizer stores the average next to its master weights. Otherwise `tensors` holds it by parameter
    name. `runs` is True after `start`.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | OffloadedOptimizer | None) -> None:
        self._module = module
        self._offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
        self._decay = 0.0
        self.runs = False
        self.tensors: dict[str, Tensor] = {}

    def start(self, decay: float) -> None:
        """Set the average to the current parameters."""
        self._decay, self.runs = decay, True
        if self._offloaded is not None:
            self._offloaded.start_averaging(decay)
            return
        trained = ((name, p) for name, p in self._module.named_parameters() if p.requires_grad)
        self.tensors = {name: p.detach().clone() for name, p in trained}

    @torch.no_grad()
    def update(self) -> None:
        """Compute mean <- decay * mean + (1 - decay) * parameter after a step; an offloaded step has done so itself."""
        for mean, live in self._pairs():
            mean.lerp_(live, 1.0 - self._decay)

    @torch.no_grad()
    def swap(self, *, shown: bool) -> None:
        """Put the average into the module (`shown`), or restore the parameters."""
        if self._offloaded is not None and self.runs:
            self._offloaded.write_to_module("average" if shown else "parameter")
        for mean, live in self._pairs():
            copy = live.clone()
            live.copy_(mean)
            mean.copy_(copy)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the local parts of each average and its parameter."""
        live = dict(self._module.named_parameters()) if self.tensors else {}
        return [(dtensors.local(mean), dtensors.local(live[name].detach())) for name, mean in self.tensors.items()]
