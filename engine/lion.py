"""Lion: the sign of an interpolated momentum (Chen et al., 2023, arXiv:2302.06675, program 1).

u = sign(b1 m + (1 - b1) g)      p <- p - lr (u + decay p)      m <- b2 m + (1 - b2) g
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """One state a parameter, `exp_avg`, in the parameter's precision and layout."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if with_gradient:
                self._update(with_gradient, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        (first, second), lr = group["betas"], group["lr"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        momenta = [self.state[p]["exp_avg"] for p in parameters]
        for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
            direction = momentum.lerp(gradient, 1 - first).sign_()
            parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            momentum.lerp_(gradient, 1 - second)
