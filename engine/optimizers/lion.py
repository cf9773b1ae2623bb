"""Lion: the sign of an interpolated momentum (Chen et al., 2023, arXiv:2302.06675, program 1).

u = sign(b1 m + (1 - b1) g)      p <- p - lr (u + decay p)      m <- b2 m + (1 - b2) g
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion with one state per parameter, `exp_avg`, in the parameter's precision and layout."""

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
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                momentum = self.state[parameter]["exp_avg"]
                direction = momentum.lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                momentum.lerp_(parameter.grad, 1 - second)
