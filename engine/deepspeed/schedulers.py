"""The scheduler section: type and params become functions of the optimizer step (engine/schedules.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import schedules
from engine.config import OptimizerConfig
from engine.deepspeed.refusals import number_of, refuse_unknown, section_of


@dataclass(frozen=True)
class Known:
    """A schedule of DeepSpeed's: its function, parameters with defaults (None: see `_filled`), their names here."""

    function: Callable[..., float]
    parameters: dict[str, Any]
    names: dict[str, str]


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
_WARMUP_NAMES = {
    "warmup_min_lr": "minimum",
    "warmup_max_lr": "maximum",
    "warmup_num_steps": "warmup_steps",
    "warmup_type": "kind",
}
_CYCLE_NAMES = {
    "cycle_first_step_size": "first",
    "cycle_second_step_size": "second",
    "cycle_first_stair_count": "first_stairs",
    "cycle_second_stair_count": "second_stairs",
    "decay_step_size": "decay_step_size",
}
SCHEDULERS = {
    "WarmupLR": Known(schedules.warmup_lr, _WARMUP, _WARMUP_NAMES),
    "WarmupDecayLR": Known(
        schedules.warmup_decay_lr,
        {"total_num_steps": None, **_WARMUP, "warmup_max_lr": 1e-3},
        {"total_num_steps": "total_steps", **_WARMUP_NAMES},
    ),
    "WarmupCosineLR": Known(
        schedules.warmup_cosine_lr,
        {
            "total_num_steps": None,
            "warmup_min_ratio": 0.0,
            "warmup_num_steps": 1000,
            "cos_min_ratio": 1e-4,
            "warmup_type": "log",
        },
        {
            "total_num_steps": "total_steps",
            "warmup_min_ratio": "minimum_ratio",
            "warmup_num_steps": "warmup_steps",
            "cos_min_ratio": "final_ratio",
            "warmup_type": "kind",
        },
    ),
    "OneCycle": Known(
        schedules.one_cycle_lr,
        {
            "cycle_min_lr": None,
            "cycle_max_lr": None,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        },
        {"cycle_min_lr": "minimum", "cycle_max_lr": "maximum", "decay_lr_rate": "decay_rate", **_CYCLE_NAMES},
    ),
    "LRRangeTest": Known(
        schedules.range_test_lr,
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
        {
            "lr_range_test_min_lr": "minimum",
            "lr_range_test_step_size": "step_size",
            "lr_range_test_step_rate": "rate",
            "lr_range_test_staircase": "staircase",
        },
    ),
}
_MOMENTUM_NAMES = {
    "cycle_min_mom": "minimum",
    "cycle_max_mom": "maximum",
    "decay_mom_rate": "decay_rate",
    **_CYCLE_NAMES,
}
NO_NUMBERS = ("warmup_type", "cycle_momentum", "lr_range_test_staircase")
DIVISORS = ("total_num_steps", "cycle_first_step_size", "cycle_second_step_size", "lr_range_test_step_size")
NEEDED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


@dataclass(frozen=True)
class Rates:
    """Learning rate, and betas where the schedule cycles them, by optimizer step."""

    lr: Callable[[int], float] | None
    betas: Callable[[int], tuple[float, float]] | None = None


def translate(section: Mapping[str, Any], optimizer: OptimizerConfig) -> Rates:
    """The schedule of a file's section. Raises ValueError for what can't be.

    "auto" takes the optimizer's rate, warm-up and length.
    """
    refuse_unknown(section, ("type", "params"), "scheduler")
    kind = section.get("type")
    if kind not in SCHEDULERS:
        refuse_unknown({str(kind): None}, tuple(SCHEDULERS), "scheduler.type", what="scheduler")
    known, given = SCHEDULERS[str(kind)], section_of("scheduler.params", section.get("params"))
    given.pop("last_batch_iteration", None)
    refuse_unknown(given, tuple(known.parameters), "scheduler.params")
    values = {**known.parameters, **given}
    _fill(values, given, optimizer)
    _check_numbers(values)
    if kind == "WarmupCosineLR":
        values["peak"] = optimizer.lr
    if values.get("warmup_type") not in (None, "log", "linear"):
        raise ValueError(f"scheduler.params.warmup_type={values['warmup_type']}: write log or linear")
    names = {**known.names, "peak": "peak"}
    lr = partial(known.function, **{names[key]: value for key, value in values.items() if key in names})
    if kind == "OneCycle" and values["cycle_momentum"]:
        chosen = {_MOMENTUM_NAMES[key]: value for key, value in values.items() if key in _MOMENTUM_NAMES}
        return Rates(lr, partial(schedules.one_cycle_betas, **chosen))
    return Rates(lr)


def _check_numbers(values: dict[str, Any]) -> None:
    """Make numbers of all that has to be one; of steps those that a formula divides by are at least 1."""
    for key, value in values.items():
        if value is not None and key not in NO_NUMBERS:
            whole = key.endswith(("_steps", "_step_size", "_count"))
            least = (1.0 if key in DIVISORS else 0.0) if whole else None
            number = number_of(f"scheduler.params.{key}", value, least)
            values[key] = int(number) if whole else number


def _fill(values: dict[str, Any], given: Mapping[str, Any], optimizer: OptimizerConfig) -> None:
    """Put numbers where the file says "auto" or a default is the optimizer's."""
    own: dict[str, Any] = {"warmup_max_lr": optimizer.lr, "total_num_steps": optimizer.total_steps}
    own |= {"warmup_num_steps": optimizer.warmup_steps or None, "warmup_min_lr": 0.0, "warmup_type": "log"}
    for key, value in values.items():
        if value == "auto" or (value is None and key == "warmup_max_lr"):
            values[key] = own.get(key)
        elif isinstance(value, list):
            raise ValueError(f"scheduler.params.{key}={value}: one number for all parameters")
    if values.get("warmup_num_steps", 1) is None:
        values["warmup_num_steps"] = 1000 if given.get("warmup_num_steps") != "auto" else 2
    for key in NEEDED:
        if key in values and values[key] is None:
            raise ValueError(f"scheduler.params.{key} is missing, and nothing else tells it; write a number")
