"""Optimizers by name, and the learning rate by step.

AdamW: Loshchilov & Hutter, 2019, arXiv:1711.05101. Left out: optimizers that look at whole rows, columns or matrices of
a parameter, or call the loss again; a rank holds shards, and a loss has been through backward when they step.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.config import OptimizerConfig
from engine.optimizers.bf16_adamw import BFloat16AdamW
from engine.optimizers.lion import Lion
from engine.optimizers.onebit_adam import ERRORS, OneBitAdam
from engine.parallel import dtensors

ADAMS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
OURS: dict[str, type[torch.optim.Optimizer]] = {
    "lion": Lion,
    "onebitadam": OneBitAdam,
    "bfloat16adamw": BFloat16AdamW,
}
UNFIT = {
    "lbfgs": "it calls the loss several times a step",
    "sparseadam": "it wants sparse gradients",
    "adafactor": "it averages over whole rows and columns, and a rank holds shards",
    "rprop": "it writes by index, which shards do not take",
    "muon": "it multiplies whole matrices, and a rank holds shards",
}


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up to the peak, then the schedule to the final ratio."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    span = max(1, config.total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    fall = done if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
    return config.lr * (1.0 - fall * (1.0 - config.final_lr_ratio))


def build(
    module: nn.Module, config: OptimizerConfig, *, states: Literal["fp32", "bf16"] = "fp32"
) -> torch.optim.Optimizer:
    """The optimizer over the module's trainable parameters; with `decay="matrices"` vectors and scalars don't decay.

    Adam's moments are made at once, so that memory is known before the first step. Raises ValueError for a name or an
    option that does not exist or can't work on shards.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if states == "bf16":  # which is AdamW's (layout.require_together)
        config = replace(config, name=BFloat16AdamW.__name__)
    optimizer = over(parts(trainable, config), config)
    if type(optimizer) in ADAMS.values():
        _make_moments(optimizer, trainable, ("exp_avg", "exp_avg_sq", *_third(config.options)))
    return optimizer


def over(groups: Sequence[tuple[list[nn.Parameter], float]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over groups of (parameters, their decay). Raises ValueError as `build` does."""
    kind = optimizer_class(config.name)
    keywords = {"lr": config.lr, **_own_keywords(config), **config.options}
    accepted = inspect.signature(kind).parameters
    for key in keywords:
        if key not in accepted:
            raise ValueError(f"optimizer {config.name} has no option {key}; it has {', '.join(sorted(accepted))}")
    decays = "weight_decay" in accepted
    if config.weight_decay and not decays:
        raise ValueError(f"optimizer {config.name} knows no weight decay: weight_decay=0, or adamw")
    given: list[dict[str, Any]] = [
        {"params": part, "weight_decay": rate} if decays else {"params": part} for part, rate in groups
    ]
    optimizer: torch.optim.Optimizer = kind(given, **keywords)
    return optimizer


def kinds(config: OptimizerConfig) -> list[str]:
    """The names of the states that have a number for each of the parameter's: what one step leaves behind."""
    return [name for name, shape in _probed(config).items() if shape == (2,)]


def state_names(config: OptimizerConfig) -> set[str]:
    """The names of all states that are kept for a parameter, numbers too; without 1-bit Adam's errors."""
    return {name for name in _probed(config) if not name.startswith(ERRORS)}


def _probed(config: OptimizerConfig) -> dict[str, torch.Size]:
    """The shapes of the states that one step of a parameter (2,) leaves behind."""
    probe = nn.Parameter(torch.ones(2))
    optimizer = over([([probe], 0.0)], config)
    probe.grad = torch.ones(2)
    optimizer.step()
    return {name: value.shape for name, value in optimizer.state[probe].items() if isinstance(value, Tensor)}


def optimizer_class(name: str) -> Any:
    """The class of an optimizer's name. Raises ValueError where there is none, or none that fits."""
    low = name.lower()
    if low == BFloat16AdamW.__name__.lower() and name != BFloat16AdamW.__name__:
        raise ValueError(f"optimizer {name} is adamw with states=bf16: name it so")
    if low in UNFIT:
        raise ValueError(f"optimizer {name}: {UNFIT[low]}; use adamw or lion")
    if low in OURS:
        return OURS[low]
    known = {key.lower(): value for key, value in vars(torch.optim).items() if _is_optimizer(value)}
    if low not in known:
        names = ", ".join(sorted([*(key for key in known if key not in UNFIT), "lion", "onebitadam"]))
        raise ValueError(f"there is no optimizer {name}; there are {names}")
    return known[low]


@dataclass(frozen=True)
class Gradients:
    """The gradients that a module's shards have; `norm` sums their squares where the module is a piece of a whole."""

    module: nn.Module
    norm: Callable[[], float] | None = None

    def squared_norm(self) -> float | Tensor:
        """The sum of squares, the same number on every rank; on the device where it was computed there."""
        if self.norm is not None:
            return self.norm()
        return dtensors.squared_norm(self._tensors())

    def scale(self, factor: float) -> None:
        """Multiply all of them."""
        torch._foreach_mul_([dtensors.local(gradient) for gradient in self._tensors()], factor)

    def _tensors(self) -> list[Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def _own_keywords(config: OptimizerConfig) -> dict[str, Any]:
    """What the configuration's fields say to this class."""
    if config.name.lower() in ADAMS:
        return {"betas": config.betas, "eps": config.eps, "fused": True}
    if config.name.lower() in ("onebitadam", "bfloat16adamw"):
        return {"betas": config.betas, "eps": config.eps}
    return {"betas": config.betas} if config.name.lower() == "lion" else {}


def averages_itself(config: OptimizerConfig) -> bool:
    """Whether the optimizer wants each rank's own gradients, and makes all ranks agree in its own way."""
    return config.name.lower() == "onebitadam"


def parts(trainable: list[nn.Parameter], config: OptimizerConfig) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters and their decay; no part is empty."""
    if config.decay == "all":
        return [(trainable, config.weight_decay)]
    matrices = [p for p in trainable if p.ndim >= 2]
    found = [(matrices, config.weight_decay), ([p for p in trainable if p.ndim < 2], 0.0)]
    return [(members, decay) for members, decay in found if members]


def _third(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("max_exp_avg_sq",) if options.get("amsgrad") else ()


def _make_moments(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], names: tuple[str, ...]) -> None:
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        optimizer.state[parameter] = {"step": step, **moments}


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that an optimizer makes at its first step, to load into; parameters stay as they are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(optimizer.state.get(p) for p in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the optimizer's state as (kind.parameter name, tensor)."""
    for name, parameter in module.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{kind}.{name}", value
