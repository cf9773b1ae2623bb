"""The exponential moving average of what is trained (Polyak and Juditsky, 1992), sharded as the parameters are."""

import torch
from torch import Tensor, nn

from engine.offload import OffloadedOptimizer
from engine.parallel import dtensors


class Average:
    """The average of a module's trained parameters, fp32; nothing until `start`.

    An offloaded optimizer keeps it beside its masters; else `tensors` are it, by the parameters' names. `runs` says
    that it was started.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | OffloadedOptimizer | None) -> None:
        self._module = module
        self._offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
        self._decay = 0.0
        self.runs = False
        self.tensors: dict[str, Tensor] = {}

    def start(self, decay: float) -> None:
        """Begin with the parameters as they are."""
        self._decay, self.runs = decay, True
        if self._offloaded is not None:
            self._offloaded.start_averaging(decay)
            return
        trained = ((name, p) for name, p in self._module.named_parameters() if p.requires_grad)
        self.tensors = {name: p.detach().clone() for name, p in trained}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step: mean <- decay * mean + (1 - decay) * parameter. Offloaded, the step did it."""
        for mean, live in self._pairs():
            mean.lerp_(live, 1.0 - self._decay)

    @torch.no_grad()
    def swap(self, *, shown: bool) -> None:
        """Put the average into the module (`shown`), or the last weights back."""
        if self._offloaded is not None and self.runs:
            self._offloaded.write_to_module("average" if shown else "parameter")
        for mean, live in self._pairs():
            kept = live.clone()
            live.copy_(mean)
            mean.copy_(kept)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's parts of each average and its parameter."""
        live = dict(self._module.named_parameters()) if self.tensors else {}
        return [(dtensors.local(mean), dtensors.local(live[name].detach())) for name, mean in self.tensors.items()]
