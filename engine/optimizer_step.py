"""One optimizer step: gradient norm, loss scale, clipping, learning rate, and the moving average of the weights.

The dynamic loss scale of fp16: Micikevicius et al., 2018, arXiv:1710.03740.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from engine.config import LossScale, OptimizerConfig
from engine.parallel import dtensors
from engine.parallel.collectives import SentBytes

if TYPE_CHECKING:
    from engine.offload import OffloadedOptimizer

Optimizer: TypeAlias = "torch.optim.Optimizer | OffloadedOptimizer"


@dataclass(frozen=True)
class Step:
    """The gradient norm of an optimizer step before clipping, its learning rate, and whether it was skipped."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class Update(Step):
    """The step of `Engine.update`, with the results of its passes.

    `loss` is the mean over the items of the global batch. `sums` are the metrics summed over micro-batches and ranks,
    `maxima` the largest values of the metrics that were named as maxima. `sent` are the bytes that this rank sent.
    """

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]
    sent: SentBytes


def average_weight(decay: float, step: int) -> float:
    """Return the weight of the parameters after optimizer step `step` (from 1) in the bias-corrected average.

        mean_t = (1 - weight) * mean_{t-1} + weight * parameter_t    weight = (1 - decay) / (1 - decay^t)

    This is the average that starts from zeros, divided by 1 - decay^t (Kingma and Ba, 2015, arXiv:1412.6980, section
    3): the parameters before the first step do not count.
    """
    return (1.0 - decay) / (1.0 - decay**step)


class Average:
    """The fp32 moving average of a module's trained parameters (Polyak and Juditsky, 1992); empty until `start`.

    An offloaded optimizer stores the average next to its master weights. Otherwise `tensors` holds it by parameter
    name. `runs` is True after `start`, and `is_shown` while the module has the average.
    """

    def __init__(self, module: nn.Module, optimizer: "Optimizer | None") -> None:
        self._module = module
        self._offloaded = None if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._decay = self._weight = 0.0
        self.runs = self.is_shown = False
        self.tensors: dict[str, Tensor] = {}
        self._hidden: list[Tensor] = []  # parameters in 16 bits, while the module has their average

    def start(self, decay: float) -> None:
        """Set the average to the current parameters. Call this before the first optimizer step."""
        self._decay, self.runs = decay, True
        if self._offloaded is not None:
            self._offloaded.start_averaging()
            return
        trained = ((name, p) for name, p in self._module.named_parameters() if p.requires_grad)
        self.tensors = {n: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for n, p in trained}

    def begin_step(self, step: int) -> None:
        """Set the weight of the parameters after optimizer step `step`, counted from 1. Skipped steps do not count."""
        if self.runs:
            self._weight = average_weight(self._decay, step)
            if self._offloaded is not None:
                self._offloaded.average_weight = self._weight

    @torch.no_grad()
    def update(self) -> None:
        """Add the parameters to the average after a step; an offloaded step has done so itself."""
        for mean, live in self._pairs():
            mean.lerp_(live.to(mean.dtype), self._weight)

    @torch.no_grad()
    def swap(self, *, shown: bool) -> None:
        """Put the average into the module (`shown`), or restore the parameters."""
        self.is_shown = shown and self.runs
        if self._offloaded is not None and self.runs:
            self._offloaded.write_to_module("average" if shown else "parameter")
        for mean, live in self._pairs():
            if mean.dtype == live.dtype:
                copy = live.clone()
                live.copy_(mean)
                mean.copy_(copy)
            elif shown:
                self._hidden.append(live.clone())
                live.copy_(mean)
            else:
                live.copy_(self._hidden.pop(0))

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the local parts of each average and its parameter."""
        live = dict(self._module.named_parameters()) if self.tensors else {}
        return [(dtensors.local(mean), dtensors.local(live[name].detach())) for name, mean in self.tensors.items()]


@dataclass
class LossScaler:
    """The factor that keeps small fp16 gradients above zero.

    A step with a non-finite gradient is skipped and costs one unit of hysteresis. The scale halves when none is left.
    After `window` steps without overflow, the scale doubles and the hysteresis is restored. In other precisions the
    scale stays 1; non-finite steps are still skipped and counted.
    """

    config: LossScale
    enabled: bool
    scale: float = 1.0
    steps: int = 0
    last_overflow: int = -1
    budget: int = 0
    skipped: int = 0

    @property
    def moves(self) -> bool:
        """Whether the scale adapts during training."""
        return self.enabled and self.config.static is None

    def __post_init__(self) -> None:
        if self.enabled:
            self.scale = self.config.static or 2.0**self.config.initial_power
        self.budget = self.config.hysteresis

    def update(self, overflow: bool) -> None:
        """Record one step. Raises FloatingPointError if the scale is at its minimum and would have to halve."""
        self.skipped += overflow
        if self.moves:
            if overflow:
                self._back_off()
            else:
                if self.config.refill:
                    self.budget = self.config.hysteresis
                good = self.steps - self.last_overflow - 1
                if good > 0 and good % self.config.window == 0:
                    self.budget = self.config.hysteresis
                    self.scale *= 2.0
        self.steps += 1

    def _back_off(self) -> None:
        if self.budget <= 1:
            if self.scale <= self.config.minimum:
                raise FloatingPointError(
                    f"fp16 gradients overflow at the smallest loss scale ({self.scale:g}), so every further step would "
                    "be skipped. Set dtype=bf16 (in a DeepSpeed file bf16.enabled), or a lower learning rate"
                )
            self.scale = max(self.scale / 2.0, self.config.minimum)
        else:
            self.budget -= 1
        self.last_overflow = self.steps

    def state(self) -> dict[str, float]:
        names = ("scale", "steps", "last_overflow", "budget", "skipped", "moves")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, float]) -> None:
        """Restore a saved state. The scale is restored only if it adapts in both precisions."""
        self.skipped = int(state["skipped"])
        if self.moves and state["moves"]:
            self.scale, self.budget = float(state["scale"]), int(state["budget"])
            self.steps, self.last_overflow = int(state["steps"]), int(state["last_overflow"])


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of step `step` (from 0): linear warm-up to the peak, then decay to the final ratio."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    span = max(1, config.total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    fall = done if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
    return config.lr * (1.0 - fall * (1.0 - config.final_lr_ratio))


class OptimizerStep:
    """The optimizer steps of one module.

    `scheduler` maps the number of steps that were not skipped to a learning rate. Without it, the optimizer
    configuration has the schedule.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: OptimizerConfig,
        scaler: LossScaler,
        average: Average,
        scheduler: Callable[[int], float] | None,
    ) -> None:
        self._module, self._optimizer, self._config = module, optimizer, config
        self._scaler, self._average, self._scheduler = scaler, average, scheduler

    def run(self, squared_norm: float, unused: set[str], number: int) -> Step:
        """Clip, update the parameters, and drop the gradients. `number` counts steps from 0.

        A step with a non-finite gradient is skipped, on all ranks. `squared_norm` is that of the scaled gradients.
        `unused` are the parameters that no rank used; the step leaves them out.
        """
        norm = math.sqrt(squared_norm) / self._scaler.scale
        lr = self._set_learning_rate(number)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = 1.0 / self._scaler.scale
            if self._config.max_grad_norm > 0:
                factor *= min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            if factor != 1.0:
                self._scale_gradients(factor)
            self._remove_gradients(unused)
            self._average.begin_step(number + 1 - self._scaler.skipped)
            self._optimizer.step()
            self._average.update()
        self._optimizer.zero_grad()
        self._scaler.update(skipped)
        return Step(norm, lr, skipped)

    def _set_learning_rate(self, number: int) -> float:
        """Set and return the learning rate of a step."""
        not_skipped = number - self._scaler.skipped
        lr = self._scheduler(not_skipped) if self._scheduler else learning_rate(self._config, number)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _scale_gradients(self, factor: float) -> None:
        if isinstance(self._optimizer, torch.optim.Optimizer):
            gradients = [dtensors.local(p.grad) for p in self._module.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, factor)
        else:
            self._optimizer.scale(factor)

    def _remove_gradients(self, names: set[str]) -> None:
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            self._optimizer.remove_gradients(names)
        for name, parameter in self._module.named_parameters() if names else ():
            if name in names:
                parameter.grad = None
