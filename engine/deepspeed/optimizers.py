"""The optimizer section: type and params become an `OptimizerConfig`.

DeepSpeed's "Adam" is AdamW unless adam_w_mode is false. Names it does not know are torch.optim's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine import optim
from engine.config import OptimizerConfig
from engine.deepspeed.refusals import number_of, refuse_unknown, section_of


@dataclass(frozen=True)
class Known:
    """An optimizer that DeepSpeed names: our name and its parameters with their defaults."""

    name: str
    parameters: dict[str, Any]


_ADAM = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "adam_w_mode": True,
    "torch_adam": False,
    "fused": True,
    "amsgrad": False,
    "set_grad_none": True,
    "fp32_optimizer_states": True,
}
OPTIMIZERS = {
    "Adam": Known("adamw", _ADAM),
    "AdamW": Known("adamw", _ADAM),
    "Lion": Known("lion", {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0}),
    "Adagrad": Known("adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    "OneBitAdam": Known(
        "onebitadam",
        {
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "freeze_step": 100_000,
            "bias_correction": True,
            "eps_inside_sqrt": False,
            "amsgrad": False,
            "cuda_aware": False,
            "comm_backend_name": "nccl",
        },
    ),
    "SGD": Known("sgd", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}),
}
_ONE_BIT = "of the compressed optimizers there is OneBitAdam"
REFUSED_OPTIMIZERS = {
    "ZeroOneAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "Lamb": "its trust ratio wants whole parameters, and a rank holds shards: AdamW",
    "FusedLamb": "its trust ratio wants whole parameters, and a rank holds shards: AdamW",
    "MuAdam": "widths are not scaled (package mup): AdamW with the rate you found",
    "MuAdamW": "widths are not scaled (package mup): AdamW with the rate you found",
    "MuSGD": "widths are not scaled (package mup): SGD with the rate you found",
    **{
        name: f"{why}: AdamW or Lion"
        for name, why in (
            ("Muon", optim.UNFIT["muon"]),
            ("LBFGS", optim.UNFIT["lbfgs"]),
            ("Adafactor", optim.UNFIT["adafactor"]),
            ("SparseAdam", optim.UNFIT["sparseadam"]),
            ("Rprop", optim.UNFIT["rprop"]),
        )
    },
}


CLASSES = {  # which people take for types
    f"{prefix}{name}": f"that is a class of DeepSpeed's: write {name}; where it steps offload_optimizer.device says"
    for name in ("Adam", "Lion", "Adagrad", "Lamb")
    for prefix in ("CPU", "DeepSpeedCPU", "Fused")
    if f"{prefix}{name}" not in REFUSED_OPTIMIZERS
}


def translate(section: Mapping[str, Any], base: OptimizerConfig | None, clipping: float | None) -> OptimizerConfig:
    """The optimizer of a file's section. Raises ValueError for what can't be.

    `base` has what the section says "auto" for, the rate where it gives none, the schedule, and who decays.
    """
    known, kind, given = _checked(section)
    values = _resolved(given, known.parameters if known else {"lr": 1e-3}, base)
    name = _name(kind, known, values)
    frame = base or OptimizerConfig(lr=0.0, schedule="constant", decay="all")
    numbers = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0} | values
    lr, eps, decay = (number_of(f"optimizer.params.{k}", numbers[k], 0.0) for k in ("lr", "eps", "weight_decay"))
    return replace(
        frame,
        lr=lr,
        betas=_betas(values.get("betas", (0.9, 0.999))),
        eps=eps,
        weight_decay=decay,
        max_grad_norm=frame.max_grad_norm if clipping is None else clipping,
        name=name,
        options=_options(name, values),
    )


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"optimizer.params.betas={json.dumps(value)}: write two numbers, [0.9, 0.999]")
    first, second = (number_of("optimizer.params.betas", each, 0.0) for each in value)
    if max(first, second) >= 1.0:
        raise ValueError(f"optimizer.params.betas={json.dumps(value)}: both have to be below 1")
    return first, second


def _checked(section: Mapping[str, Any]) -> tuple[Known | None, str, dict[str, Any]]:
    """What DeepSpeed knows of the type, the type, its parameters as given."""
    refuse_unknown(section, ("type", "params", "legacy_fusion"), "optimizer")
    kind, given = section.get("type"), section_of("optimizer.params", section.get("params"))
    if not isinstance(kind, str):
        raise ValueError('optimizer.type is missing: "AdamW", "Lion", "Adagrad", "SGD" or a name of torch.optim')
    for name, why in [*REFUSED_OPTIMIZERS.items(), *CLASSES.items()]:
        if name.lower() == kind.lower():
            raise ValueError(f"optimizer.type={kind}: {why}")
    if given.get("max_grad_norm"):
        raise ValueError(f"optimizer.params.max_grad_norm: use gradient_clipping={given['max_grad_norm']} instead")
    given.pop("max_grad_norm", None)
    known = next((known for name, known in OPTIMIZERS.items() if name.lower() == kind.lower()), None)
    if known is not None:
        refuse_unknown(given, tuple(known.parameters), "optimizer.params")
    return known, kind, given


def _options(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the class that `OptimizerConfig` has no field for."""
    if name in optim.ADAMS:
        return {"amsgrad": True} if values.get("amsgrad") else {}
    if name == "onebitadam":
        for key in ("amsgrad", "eps_inside_sqrt"):
            if values[key]:
                raise ValueError(f"optimizer.params.{key}=true: OneBitAdam has Adam's own variance; leave it false")
        return {"freeze_step": int(number_of("optimizer.params.freeze_step", values["freeze_step"], 1))}
    fields = ("lr", "weight_decay", "betas") if name == "lion" else ("lr", "weight_decay")
    return {key: value for key, value in values.items() if key not in fields}


def _resolved(given: dict[str, Any], defaults: Mapping[str, Any], base: OptimizerConfig | None) -> dict[str, Any]:
    """Values with defaults and "auto" filled in."""
    found = {**defaults, **given}
    own = {} if base is None else {key: getattr(base, key) for key in ("lr", "betas", "eps", "weight_decay")}
    if "lr" not in given and "lr" in own:
        found["lr"] = own["lr"]
    for key, value in found.items():
        if value is None or value == "auto":
            found[key] = own.get(key, defaults.get(key))
    return found


def _name(kind: str, known: Known | None, given: dict[str, Any]) -> str:
    if known is None:
        try:
            optim.optimizer_class(kind)
        except ValueError as problem:
            raise ValueError(f"optimizer.type={kind}: {problem}") from None
        return kind.lower()
    if known.name != "adamw":
        return known.name
    if not given.get("bias_correction", True):
        raise ValueError("optimizer.params.bias_correction=false: Adam always corrects its moments here; leave it true")
    # With torch_adam the type alone tells the two apart; without, DeepSpeed's Adam decays as AdamW does.
    decoupled = kind.lower() == "adamw" if given.get("torch_adam") else given.get("adam_w_mode", True)
    return "adamw" if decoupled or kind.lower() == "adamw" else "adam"
