"""Parses a DeepSpeed configuration into the engine's own settings.

Steps: read the JSON, convert each value by the table of keys (deepspeed_keys.py), fill "auto" and absent keys from the
caller's settings or DeepSpeed's defaults, and translate. Every problem raises a ValueError with the key and what to
write.
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import optim
from engine.config import SMALLEST_SUB_GROUP, Compress, EngineConfig, LossScale, OptimizerConfig
from engine.deepspeed_keys import KEYS, OPTIMIZERS, PARAMETERS, SCHEDULERS, Key
from engine.schedules import SCHEDULES
from engine.sharding import check_optimizer

__all__ = ["Parsed", "config_fields", "ignored", "load", "parse"]

RENAMED = {"bfloat16": "bf16"}
TYPED = ("optimizer", "scheduler")  # sections with `type` and `params`
FIELDS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # of OptimizerConfig
OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
SECTIONS = {name.rsplit(".", depth)[0] for name in KEYS for depth in range(1, name.count(".") + 1)}
SWITCHES = {"enabled": False, "deepcompile": False, "disable": True}  # these values switch a section off
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
COMPRESS: dict[tuple[bool, bool], Compress] = {  # of (weights, gradients)
    (False, False): "none", (True, False): "gather8", (False, True): "reduce8", (True, True): "both",
}  # fmt: skip


@dataclass(frozen=True)
class Parsed:
    """The settings of a DeepSpeed configuration.

    `optimizer` is None if neither the configuration nor the caller has one. `scheduler` maps the optimizer step to the
    learning rate; None without a scheduler. `micro_batch_size` is in rows, for the caller's data loader; None if the
    configuration leaves it open. `ignored` has one line for each key without effect.
    """

    engine: EngineConfig
    optimizer: OptimizerConfig | None
    scheduler: Callable[[int], float] | None
    micro_batch_size: int | None
    drops_last_batch: bool
    ignored: tuple[str, ...]


def parse(
    config: Mapping[str, Any] | str | Path,
    *,
    ranks: int | None = 1,
    optimizer: OptimizerConfig | None = None,
    overrides: bool = False,
    base: Mapping[str, Any] | None = None,
) -> Parsed:
    """Check and translate a configuration (a dictionary or a JSON file).

    `optimizer` has the caller's settings for keys that are "auto" or absent; with `overrides` it replaces the section
    `optimizer`. `base` has fields of `EngineConfig` for such keys, by default DeepSpeed's (stage 0, fp32). `ranks=None`
    skips the check of the batch sizes, for callers that do not know the number of ranks yet.
    """
    raw = _raw(config)
    engine = EngineConfig(**config_fields(raw, {"dtype": "fp32"} if base is None else base))
    values = _values(raw)
    micro, accumulation = _batch_sizes(values, ranks) if ranks is not None else (None, None)
    if accumulation is not None:
        engine = replace(engine, gradient_accumulation=accumulation)
    sections = {name: _section(name, raw.get(name)) for name in TYPED}
    for name, section in sections.items():
        _require_known(section, ("type", "params", "legacy_fusion"), f"{name}.")
    if sections["optimizer"] and not overrides:
        optimizer = _optimizer(sections["optimizer"], optimizer)
    if optimizer is not None:
        optimizer = replace(optimizer, max_grad_norm=values.get("gradient_clipping", optimizer.max_grad_norm))
        check_optimizer(engine, optimizer)
    scheduler = None
    if sections["scheduler"]:
        if optimizer is None:
            raise ValueError("scheduler: there is no optimizer to schedule; add the optimizer section, or optimizer=")
        scheduler = _scheduler(sections["scheduler"], optimizer)
    drops_last = bool(values.get("dataloader_drop_last"))
    return Parsed(engine, optimizer, scheduler, micro, drops_last, tuple(ignored(raw)))


def load(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return the content of a configuration after a check that needs neither ranks nor steps. Raises ValueError."""
    raw = _raw(config)
    parse(raw, ranks=None, optimizer=OptimizerConfig(lr=1e-5, total_steps=1))
    return raw


def config_fields(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `EngineConfig`: the configuration's values, and `own` for open keys.

    Raises ValueError for unknown keys and wrong values. Does not check whether the fields are valid together.
    """
    values = _values(config)
    if values.get("zero_optimization.mics_shard_size", 1) < 1:
        del values["zero_optimization.mics_shard_size"]
    if (size := values.get("zero_optimization.sub_group_size")) is not None:  # 0: a sub-group for each parameter
        values["zero_optimization.sub_group_size"] = max(size, SMALLEST_SUB_GROUP)
    if len({values[name] for section in OFFLOADS if (name := f"{section}.nvme_path") in values}) > 1:
        raise ValueError(
            "zero_optimization: offload_optimizer.nvme_path and offload_param.nvme_path differ; write one folder"
        )
    fields = vars(EngineConfig()) | dict(own)
    scale: dict[str, Any] = {}
    for name, value in values.items():
        if (field := KEYS[name].field) is not None:
            (scale if name.startswith("fp16.") else fields)[field] = value
    fp16, bf16 = values.get("fp16.enabled"), values.get("bf16.enabled")
    if fp16 and bf16:
        raise ValueError("fp16.enabled and bf16.enabled are both true; keep one")
    if fp16 or bf16 or fp16 is bf16 is False:
        fields["dtype"] = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    if scale or fp16 is not None:
        scale |= {"static": scale.get("static") or None}  # DeepSpeed's constant scale 0 is none
        scale |= {"hysteresis": 1} if fields["zero_stage"] == 0 else {}  # and its stage 0 has no hysteresis
        try:
            fields["loss_scale"] = LossScale(**scale)
        except ValueError as problem:
            raise ValueError(f"fp16: {problem}") from None
    if values.get("activation_checkpointing.partition_activations") or (
        "activation_checkpointing.number_checkpoints" in values
    ):
        fields["activation_checkpointing"] = True
    quantized = [values.get(f"zero_optimization.zero_quantized_{what}") for what in ("weights", "gradients")]
    if quantized != [None, None]:
        fields["compress"] = COMPRESS[bool(quantized[0]), bool(quantized[1])]
    return fields


def ignored(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key without effect, unless its value switches the feature off."""
    for name, value in _leaves(config):
        if name in KEYS and KEYS[name].kind == "ignored" and value != "auto" and not _is_off(name, value):
            yield f"{name} has no effect (see docs/reference/deepspeed.md)"


def _raw(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read a JSON file with comments, which DeepSpeed accepts (it reads Hjson)."""
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config).expanduser()
    if not path.is_file():
        raise ValueError(f"{config}: there is no such file in {Path.cwd()}; give the path of a JSON file")
    text = COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), path.read_text("utf-8"))
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # the text after ";" is advice to programmers
        raise ValueError(f"{config} is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{config} must contain one JSON object")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} occurs twice in one section: remove one")
    return dict(pairs)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all dotted keys with their values, without the sections `optimizer` and `scheduler` and without remarks."""
    for name, value in section.items():
        key = f"{prefix}{name if prefix else RENAMED.get(name, name)}"
        if f"{prefix}stage3_{name}" in KEYS:  # DeepSpeed accepts both names
            key = f"{prefix}stage3_{name}"
        if key in TYPED or name.startswith(("_", "#", "//")):
            continue
        if key in OFFLOADS and (value is None or value is False):
            yield f"{key}.device", "none"
        elif key in SECTIONS and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check all keys, and return the converted values of the supported ones ("auto" and null are none)."""
    found = {}
    for name, value in _leaves(config):
        if value is None or value == "auto":
            continue
        if name in SECTIONS:
            _section(name, value)
            continue
        _require_known([name], [*KEYS, *TYPED, *sorted(SECTIONS)])
        if KEYS[name].kind == "unsupported" and not _is_off(name, value):
            raise ValueError(f"{name}={json.dumps(value)} is not supported: {KEYS[name].note}")
        if KEYS[name].kind not in ("ignored", "unsupported"):
            found[name] = _convert(name, KEYS[name], value)
    return found


def _convert(name: str, key: Key, value: Any) -> Any:
    """Return a value in the type of its key. Raises ValueError for a wrong type or value."""
    if key.kind == "pair":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError(f"{name}={json.dumps(value)}: write two numbers, [0.9, 0.999]")
        return tuple(_number(name, each, key) for each in value)
    if key.kind in ("int", "number"):
        value = _number(name, value, key)
    elif not isinstance(value, bool if key.kind == "bool" else str):
        expected = "true or false" if key.kind == "bool" else "text"
        raise ValueError(f"{name}={json.dumps(value)}: write {expected}, as JSON")
    if key.choices and value not in key.choices:
        shown, *choices = (str(each).lower() if key.kind == "bool" else str(each) for each in (value, *key.choices))
        raise ValueError(f"{name}={shown} is not supported; write {'one of ' * (len(choices) > 1)}{', '.join(choices)}")
    return {"bfp16": "bf16"}.get(value, value)


def _number(name: str, value: Any, key: Key) -> float:
    """Return a number, also from text ("1e-5")."""
    is_whole = key.kind == "int"
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    is_low = key.minimum is not None and number < key.minimum
    if number != number or is_low or (is_whole and not number.is_integer()):
        bound = "" if key.minimum is None else f", at least {key.minimum:g}"
        raise ValueError(f"{name}={json.dumps(value)}: write a {'whole ' if is_whole else ''}number{bound}")
    return int(number) if is_whole else number


def _is_off(name: str, value: Any) -> bool:
    """Return whether a value switches a feature off. A size (of a group of ranks) does so at 1."""
    if isinstance(value, Mapping):
        return not value or any(value.get(key) is off for key, off in SWITCHES.items())
    return value is None or value is False or (name.endswith("_size") and value == 1)


def _section(name: str, value: Any) -> dict[str, Any]:
    """Return a section; empty for null and "auto"."""
    if value is None or value == "auto":
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={json.dumps(value)}: write a section, {{key: value, ...}}, or remove the key")
    return dict(value)


def _require_known(names: Iterable[str], known: Iterable[str], section: str = "") -> None:
    """Raise ValueError for the first unknown name. It suggests a similar one, from the name's own section if possible.

    `section` is the prefix of all names.
    """
    keys = [section + name for name in known]
    for name in (section + name for name in names):
        if name not in keys:
            own, _, leaf = name.rpartition(".")
            by_leaf = {key.rpartition(".")[2]: key for key in sorted(keys, key=lambda k: k.rpartition(".")[0] == own)}
            close = difflib.get_close_matches(leaf, list(by_leaf), n=1)
            hint = f"did you mean {by_leaf[close[0]]}?" if close else "docs/reference/deepspeed.md lists all keys"
            raise ValueError(f"{name}: DeepSpeed has no such key; {hint}")


def _batch_sizes(values: Mapping[str, Any], ranks: int) -> tuple[int | None, int | None]:
    """Return (micro-batch size, accumulation steps). One of them and the global batch size determine the other."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, total = (values.get(name) for name in names)
    if total is not None:
        if micro is None:
            steps = steps or 1
            micro = total // (ranks * steps)
        steps = steps or total // (micro * ranks)
        if micro * steps * ranks != total:
            raise ValueError(
                f"train_batch_size={total} is not micro-batch {micro} x accumulation {max(1, steps)} x {ranks} ranks; "
                f"write train_batch_size={max(1, micro) * max(1, steps) * ranks}, or remove one of the three keys"
            )
    elif micro is not None:
        steps = steps or 1
    return micro, steps


def _optimizer(section: Mapping[str, Any], base: OptimizerConfig | None) -> OptimizerConfig:
    """Translate the optimizer section. `base` has the values for "auto", the schedule, and which parameters decay."""
    kind = section.get("type")
    if not isinstance(kind, str):
        raise ValueError('optimizer.type is missing; write "AdamW", "Lion", "Adagrad", "SGD" or a class of torch.optim')
    try:
        arguments = inspect.signature(optim.optimizer_class(kind)).parameters
    except ValueError as problem:
        raise ValueError(f"optimizer.type={kind}: {problem}") from None
    params = _section("optimizer.params", section.get("params"))
    if params.pop("max_grad_norm", None):
        raise ValueError("optimizer.params.max_grad_norm is not supported: write gradient_clipping at the top level")
    name = next((name for name in OPTIMIZERS if name.lower() == kind.lower()), kind)
    own = {} if base is None else {key: getattr(base, key) for key in FIELDS}
    _require_known(params, OPTIMIZERS.get(name, arguments), "optimizer.params.")
    defaults = {"lr": 1e-3} | OPTIMIZERS.get(name, {}) | ({"lr": own["lr"]} if own else {})
    values = _converted("optimizer.params.", params, defaults, own, name)
    fields = FIELDS | {key: value for key, value in values.items() if key in FIELDS}
    fields["name"], fields["options"] = _name_and_options(kind.lower(), values)
    return replace(base or OptimizerConfig(lr=0.0, schedule="constant", decay="all"), **fields)


def _name_and_options(kind: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the optimizer here, and its arguments for which `OptimizerConfig` has no field."""
    if kind in optim.ADAMS:
        # DeepSpeed's "Adam" decays as AdamW does unless adam_w_mode is false, also with torch_adam.
        is_decoupled = kind == "adamw" or values["adam_w_mode"]
        return "adamw" if is_decoupled else "adam", {"amsgrad": True} if values["amsgrad"] else {}
    if kind == "onebitadam":
        return kind, {"freeze_step": values["freeze_step"]}
    fields = ("lr", "weight_decay", "betas") if kind == "lion" else ("lr", "weight_decay")
    return kind, {key: value for key, value in values.items() if key not in fields}


def _scheduler(section: Mapping[str, Any], optimizer: OptimizerConfig) -> Callable[[int], float]:
    """Translate the scheduler section. "auto" stands for the optimizer's rate, warm-up and number of steps."""
    kind, params = str(section.get("type")), _section("scheduler.params", section.get("params"))
    if kind not in SCHEDULERS:
        raise ValueError(
            f"scheduler.type={kind} is not supported; write one of {', '.join(SCHEDULERS)}, or pass a scheduler of "
            "torch to `initialize`: lr_scheduler=torch.optim.lr_scheduler.OneCycleLR(..., cycle_momentum=False)"
        )
    params.pop("last_batch_iteration", None)
    defaults = SCHEDULERS[kind]
    _require_known(params, defaults.keys() - {"optimizer_lr"}, "scheduler.params.")
    auto = {
        "warmup_max_lr": optimizer.lr,
        "total_num_steps": optimizer.total_steps,
        "warmup_num_steps": optimizer.warmup_steps or 2,
        "optimizer_lr": optimizer.lr,
    }
    return SCHEDULES[kind](**_converted("scheduler.params.", params, defaults, auto)).lr


def _converted(
    section: str, params: Mapping[str, Any], defaults: Mapping[str, Any], auto: Mapping[str, Any], kind: str = ""
) -> dict[str, Any]:
    """Return the parameters of an optimizer or scheduler by the table of parameters. `auto` has values for "auto"."""
    values = {}
    for name, value in {**defaults, **params}.items():
        if value is None or value == "auto":
            value = auto.get(name, defaults.get(name))
        key = PARAMETERS.get(f"{kind}.{name}") or PARAMETERS.get(name)
        if value is not None:
            values[name] = value if key is None else _convert(section + name, key, value)
        elif name in defaults:
            raise ValueError(f"{section}{name} is missing and has no default; write a number")
    return values
