"""Pure bf16 states: AdamW on bf16 parameters and moments, without fp32 masters, rounded stochastically.

bf16 has 8 bits of precision: rounded to the nearest, an update below 1/512 of its weight is lost, every time. Rounded
up with the probability of what is cut off, it is kept on average (Gupta et al., 2015, arXiv:1502.02551, section 3.1).
The random numbers of a step are a function of (seed, step, shard): a resumed run draws the same ones, and replicas of
a shard stay equal.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from engine.parallel import dtensors

AT_ONCE = 2**20  # numbers that are in fp32 at a time
_STEPS = 2**32  # seeds between two shards


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 values as bf16, each up or down to a neighbour with the mean of the value itself."""
    noise = torch.randint(2**16, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = (values.view(torch.int32) + noise) & -(2**16)  # a bf16 is the upper half of a fp32
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW whose parameters and moments are bf16; 6 bytes a parameter in all. The arithmetic of a step is fp32."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed = seed
        for parameter in self._parameters():
            assert parameter.dtype == torch.bfloat16
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        generator = self._generator()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, generator)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _generator(self) -> torch.Generator:
        parameters = self._parameters()
        first = dtensors.local(parameters[0])
        done = max(int(self.state[p]["step"]) for p in parameters)
        generator = torch.Generator(first.device)
        return generator.manual_seed(self.seed * 1_000_003 + dtensors.shard_rank(parameters[0]) * _STEPS + done)

    def _update(self, parameter: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        (first, second), state = group["betas"], self.state[parameter]
        state["step"] += 1
        steps = int(state["step"])
        rate, root = group["lr"] / (1.0 - first**steps), (1.0 - second**steps) ** 0.5
        kept = [dtensors.local(t).view(-1) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        gradient = dtensors.local(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        for start in range(0, len(gradient), AT_ONCE):
            pieces = [tensor[start : start + AT_ONCE] for tensor in kept]
            weights, mean, square = (piece.float() for piece in pieces)
            change = gradient[start : start + AT_ONCE].float()
            mean.lerp_(change, 1.0 - first)
            square.mul_(second).addcmul_(change, change, value=1.0 - second)
            weights.mul_(1.0 - group["lr"] * group["weight_decay"])
            weights.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-rate)
            for piece, exact in zip(pieces, (weights, mean, square), strict=True):
                piece.copy_(round_stochastically(exact, generator))
