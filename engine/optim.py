"""Optimizers by name, their states, and Lion.

AdamW: Loshchilov & Hutter, 2019, arXiv:1711.05101. Lion: Chen et al., 2023, arXiv:2302.06675.

Not supported: optimizers that need full rows, columns or matrices of a parameter, because a rank holds shards, and
optimizers that evaluate the loss again.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.config import OptimizerConfig


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (program 1 of the paper). The state `exp_avg` is like the parameter.

    u = sign(b1 m + (1 - b1) g)      p <- p - lr (u + decay p)      m <- b2 m + (1 - b2) g
    """

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


ADAMS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
CONFIG_FIELDS = {
    "adamw": ("betas", "eps"), "adam": ("betas", "eps"), "onebitadam": ("betas", "eps"), "lion": ("betas",),
}  # fmt: skip
UNSUPPORTED = {
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "it needs sparse gradients",
    "adafactor": "it averages over full rows and columns, and a rank holds shards",
    "rprop": "it writes by index, which DTensor does not support",
    "muon": "it multiplies full matrices, and a rank holds shards",
}


def build(
    module: nn.Module, config: OptimizerConfig, *, states: Literal["fp32", "bf16"] = "fp32"
) -> torch.optim.Optimizer:
    """Return the optimizer of a module's trainable parameters.

    With `decay="matrices"` vectors and scalars have no weight decay. Adam's moments are allocated at once, so that
    memory use is known before the first step. Raises ValueError for an unknown or unsupported name or option.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    kind = _bf16_adamw() if states == "bf16" else optimizer_class(config.name)
    optimizer = with_groups(parameter_groups(trainable, config), config, kind)
    if kind in ADAMS.values():
        allocate_states(module, optimizer, config, [name for name, p in module.named_parameters() if p.requires_grad])
    return optimizer


def with_groups(
    groups: Sequence[tuple[list[nn.Parameter], float]], config: OptimizerConfig, kind: Any = None
) -> torch.optim.Optimizer:
    """Return the optimizer of groups of (parameters, weight decay). `kind` is its class, by default that of the name.

    Raises ValueError like `build`.
    """
    kind = kind or optimizer_class(config.name)
    own = {field: getattr(config, field) for field in CONFIG_FIELDS.get(config.name.lower(), ())}
    keywords = {"lr": config.lr, **own, **({"fused": True} if kind in ADAMS.values() else {}), **config.options}
    accepted = inspect.signature(kind).parameters
    for key in keywords:
        if key not in accepted:
            raise ValueError(f"optimizer {config.name} has no option {key}. Use one of {', '.join(sorted(accepted))}")
    decays = "weight_decay" in accepted
    if config.weight_decay and not decays:
        raise ValueError(f"optimizer {config.name} has no weight decay. Set weight_decay=0, or use the optimizer adamw")
    torch_groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": rate} if decays else {"params": members} for members, rate in groups
    ]
    optimizer: torch.optim.Optimizer = kind(torch_groups, **keywords)
    return optimizer


def moment_names(config: OptimizerConfig) -> list[str]:
    """Return the names of the states that have the shape of the parameter."""
    return [name for name, state in example_states(config).items() if state.shape == (2,)]


def example_states(config: OptimizerConfig, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the states after one step of a parameter (2,) on a device. Some scalar states stay on the CPU."""
    probe = nn.Parameter(torch.ones(2, device=device))
    optimizer = with_groups([([probe], 0.0)], config)
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    return {name: value for name, value in optimizer.state[probe].items() if isinstance(value, Tensor)}


def optimizer_class(name: str) -> Any:
    """Return the class of an optimizer. Raises ValueError for an unknown or unsupported name."""
    low = name.lower()
    if low in UNSUPPORTED:
        raise ValueError(f"optimizer {name} is not supported: {UNSUPPORTED[low]}. Use adamw or lion")
    if low == "onebitadam":
        from engine.optimizers.onebit_adam import OneBitAdam

        return OneBitAdam
    known = {key.lower(): value for key, value in vars(torch.optim).items() if _is_optimizer(value)} | {"lion": Lion}
    if low not in known:
        names = ", ".join(sorted({*known, "onebitadam"} - UNSUPPORTED.keys()))
        raise ValueError(f"there is no optimizer {name}. Use one of {names}")
    return known[low]


def _bf16_adamw() -> Any:
    from engine.optimizers.bf16_adamw import BFloat16AdamW

    return BFloat16AdamW


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def averages_itself(config: OptimizerConfig) -> bool:
    """Return whether the optimizer takes local gradients and averages over ranks itself."""
    return config.name.lower() == "onebitadam"


def parameter_groups(trainable: list[nn.Parameter], config: OptimizerConfig) -> list[tuple[list[nn.Parameter], float]]:
    """Return the groups (parameters, weight decay) that are not empty."""
    if config.decay == "all":
        return [(trainable, config.weight_decay)]
    matrices = [p for p in trainable if p.ndim >= 2]
    found = [(matrices, config.weight_decay), ([p for p in trainable if p.ndim < 2], 0.0)]
    return [(members, decay) for members, decay in found if members]


def allocate_states(
    module: nn.Module, optimizer: torch.optim.Optimizer, config: OptimizerConfig, names: Collection[str]
) -> None:
    """Give the named parameters states, zeros. The others get the states of a new optimizer, mostly none."""
    examples: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if name not in names:
            optimizer.state[parameter] = with_groups([([parameter], 0.0)], config, type(optimizer)).state[parameter]
        elif not optimizer.state.get(parameter):
            examples = examples or example_states(config, parameter.device)
            optimizer.state[parameter] = {
                kind: torch.zeros_like(parameter if value.ndim else value) for kind, value in examples.items()
            }
