"""Adam and AdamW on the host, a few numbers at a time, so that a number is cast while it is still in the cache.

A step is bound by memory. Where it can be compiled (engine/kernels/host) one pass does all of it. Elsewhere torch's
fused kernel steps, 28 bytes a parameter; by itself the cast to 16 bits reads 4 of them again, the gradient's own cast
and its scaling 8 each; done chunk by chunk they come from the cache. Left out: amsgrad, whose third state torch's own
class steps.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.kernels.host import adam as compiled

CHUNK = 2**16  # parameters a thread: 1 MiB of masters, gradients and moments, which fits a core's second-level cache
MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdam:
    """Steps of a `torch.optim.Adam` or `AdamW`, whose groups say how."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    @staticmethod
    def serves(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
        """Whether that is what this optimizer does on this device."""
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or device.type != "cpu":
            return False
        defaults = optimizer.defaults
        return bool(defaults["fused"]) and not (defaults["amsgrad"] or defaults["maximize"])

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        states: Mapping[str, Tensor],
        gradient: Tensor,
        factor: float,
        target: Tensor,
    ) -> None:
        """One step of flat `states` (parameter, exp_avg, exp_avg_sq; step counts it) by `factor` x `gradient`.

        `target` gets the new parameters in its own precision.
        """
        states["step"].add_(1.0)
        # What torch.optim's classes call, the same from 2.11 to 2.13.
        decoupled = isinstance(optimizer, torch.optim.AdamW) or optimizer.defaults.get("decoupled_weight_decay")
        if compiled.serves(gradient, target):
            mean, square = (states[kind] for kind in MOMENTS)
            compiled.adam(
                states["parameter"],
                mean,
                square,
                gradient,
                step=int(states["step"]),
                group=group,
                decoupled=bool(decoupled),
                factor=factor,
                target=target,
            )
            return
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        size = CHUNK * torch.get_num_threads()
        flat = [states["parameter"], *(states[kind] for kind in MOMENTS), gradient, target]
        for master, mean, square, grad, place in zip(*(tensor.split(size) for tensor in flat), strict=True):
            fused(
                [master],
                [self._scaled(grad, factor, size)],
                [mean],
                [square],
                [],
                [states["step"]],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            place.copy_(master)

    def _scaled(self, gradient: Tensor, factor: float, size: int) -> Tensor:
        if gradient.dtype == torch.float32 and factor == 1.0:
            return gradient
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        scaled = self._scratch[: len(gradient)].copy_(gradient)
        return scaled if factor == 1.0 else scaled.mul_(factor)
