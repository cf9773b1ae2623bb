"""AdamW with bf16 parameters and moments, stochastic rounding, and no fp32 master weights.

bf16 has 8 bits of precision: rounding to nearest loses every update below 1/512 of its weight. Stochastic rounding
rounds up with a probability equal to the truncated fraction, so updates are preserved on average (Gupta et al., 2015,
arXiv:1502.02551, section 3.1). The random numbers of a step are a function of (step, shard): a resumed run draws the
same numbers, and replicas of a shard stay equal.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from engine.parallel import dtensors

CHUNK = {"cpu": 2**20, "cuda": 2**22}  # elements that are fp32 at a time; with fewer, a GPU waits for the host
_MAX_STEPS = 2**32  # seeds between two shards


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values to one of the two neighbouring bf16 numbers, so that the mean is the value itself."""
    noise = torch.randint(2**16, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = (values.view(torch.int32) + noise) & -(2**16)  # a bf16 number is the upper half of an fp32 number
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with 6 bytes per parameter. The arithmetic of a step is fp32."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter in self._parameters():
            assert parameter.dtype == torch.bfloat16
            step = torch.zeros((), dtype=torch.float32)  # on the host, which reads it in each step
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
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
        steps = max(int(self.state[p]["step"]) for p in parameters)
        generator = torch.Generator(first.device)
        return generator.manual_seed(dtensors.shard_rank(parameters[0]) * _MAX_STEPS + steps)

    def _update(self, parameter: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        (first, second), state = group["betas"], self.state[parameter]
        state["step"] += 1
        steps = int(state["step"])
        rate, root = group["lr"] / (1.0 - first**steps), (1.0 - second**steps) ** 0.5
        stored = [dtensors.local(t).view(-1) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        gradient = dtensors.local(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        size = CHUNK[gradient.device.type]
        for *chunks, gradients in zip(*(tensor.split(size) for tensor in (*stored, gradient)), strict=True):
            weights, mean, square = (chunk.float() for chunk in chunks)
            fp32_gradient = gradients.float()
            mean.lerp_(fp32_gradient, 1.0 - first)
            square.mul_(second).addcmul_(fp32_gradient, fp32_gradient, value=1.0 - second)
            weights.mul_(1.0 - group["lr"] * group["weight_decay"])
            weights.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-rate)
            for chunk, exact in zip(chunks, (weights, mean, square), strict=True):
                chunk.copy_(round_stochastically(exact, generator))
