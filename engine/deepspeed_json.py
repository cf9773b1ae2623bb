"""Parses a DeepSpeed configuration into the engine's own settings.

Steps: read the JSON, convert each value by the table of keys (deepspeed_keys.py), fill "auto" and absent keys from the
caller's settings or DeepSpeed's defaults, and translate. Every problem raises a ValueError with the key and what to
write.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine import optim
from engine.config import Compress, EngineConfig, LossScale, OptimizerConfig
from engine.deepspeed_keys import KEYS, OPTIMIZERS, UNSUPPORTED_OPTIMIZERS, UNSUPPORTED_SCHEDULERS, Key
from engine.schedules import SCHEDULES, WarmupCosineLR, parameters
from engine.sharding import check_optimizer

__all__ = ["Parsed", "config_fields", "ignored", "load", "parse"]

RENAMED = {"bfloat16": "bf16"}
TYPED = ("optimizer", "scheduler")  # sections with `type` and `params`
OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
SECTIONS = {name.rsplit(".", depth)[0] for name in KEYS for depth in range(1, name.count(".") + 1)}
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
COMPRESS: dict[tuple[bool, bool], Compress] = {  # of (weights, gradients)
    (False, False): "none", (True, False): "gather8", (False, True): "reduce8", (True, True): "both",
}  # fmt: skip


@dataclass(frozen=True)
class Parsed:
    """The settings of a DeepSpeed configuration.

    `optimizer` is None if neither the configuration nor the caller has one. `scheduler` maps the optimizer step to the
    learning rate; None without a scheduler. The batch sizes are in rows, for the caller's data loader; None if the
    configuration leaves them open. `ignored` has one line for each key without effect.
    """

    engine: EngineConfig
    optimizer: OptimizerConfig | None
    scheduler: Callable[[int], float] | None
    micro_batch_size: int | None
    train_batch_size: int | None
    drops_last_batch: bool
    ignored: tuple[str, ...]


def parse(
    config: Mapping[str, Any] | str | Path,
    *,
    ranks: int | None = 1,
    optimizer: OptimizerConfig | None = None,
    base: EngineConfig | Mapping[str, Any] | None = None,
) -> Parsed:
    """Check and translate a configuration (a dictionary or a JSON file).

    `optimizer` and `base` are the caller's settings for keys that are "auto" or absent; without `base`, DeepSpeed's
    defaults (stage 0, fp32). `base` may be a dictionary of fields that are valid only with the configuration's.
    `ranks=None` skips the check of the batch sizes, for callers that do not know the number of ranks yet.
    """
    raw = _raw(config)
    base = EngineConfig(dtype="fp32") if base is None else base
    engine = EngineConfig(**config_fields(raw, vars(base) if isinstance(base, EngineConfig) else base))
    values = _values(raw)
    micro, accumulation, total = _batch_sizes(values, ranks) if ranks is not None else (None, None, None)
    if accumulation is not None:
        engine = replace(engine, gradient_accumulation=accumulation)
    if section := _section("optimizer", raw.get("optimizer")):
        optimizer = _optimizer(section, optimizer)
    if optimizer is not None:
        optimizer = replace(optimizer, max_grad_norm=values.get("gradient_clipping", optimizer.max_grad_norm))
        check_optimizer(engine, optimizer)
    scheduler = None
    if section := _section("scheduler", raw.get("scheduler")):
        if optimizer is None:
            raise ValueError("scheduler: there is no optimizer to schedule; add the optimizer section, or optimizer=")
        scheduler = _scheduler(section, optimizer)
    drops_last = bool(values.get("dataloader_drop_last"))
    return Parsed(engine, optimizer, scheduler, micro, total, drops_last, tuple(ignored(raw)))


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
        fields["loss_scale"] = _loss_scale(scale, fields["zero_stage"])
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
            yield f"{name} has no effect: {KEYS[name].note}"


# Keys and their values


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
    except json.JSONDecodeError as error:
        raise ValueError(f"{config} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{config} must contain one JSON object")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    for name, _ in pairs if len(section) < len(pairs) else ():
        if sum(name == other for other, _ in pairs) > 1:
            raise ValueError(f"{name} occurs twice in one section; remove one")
    return section


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all dotted keys with their values, without the sections `optimizer` and `scheduler` and without remarks."""
    for name, value in section.items():
        key = f"{prefix}{name if prefix else RENAMED.get(name, name)}"
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
        elif name not in KEYS:
            raise ValueError(f"{name}: DeepSpeed has no such key; {_similar_key(name)}")
        elif KEYS[name].kind == "unsupported" and not _is_off(name, value):
            raise ValueError(f"{name}={json.dumps(value)} is not supported: {KEYS[name].note}")
        elif KEYS[name].kind not in ("ignored", "unsupported"):
            found[name] = _convert(name, KEYS[name], value)
    return found


def _convert(name: str, key: Key, value: Any) -> Any:
    """Return the value of a supported key as its field has it. Raises ValueError for a wrong type or value."""
    if key.kind in ("int", "number"):
        value = _number(name, value, key.minimum, is_whole=key.kind == "int")
    elif not isinstance(value, bool if key.kind == "bool" else str):
        expected = "true or false" if key.kind == "bool" else "text"
        raise ValueError(f"{name}={json.dumps(value)}: write {expected}, as JSON")
    if key.choices and value not in key.choices:
        raise ValueError(f"{name}={value} is not supported; write one of {', '.join(map(str, key.choices))}")
    return {"bfp16": "bf16"}.get(value, value)


def _number(name: str, value: Any, minimum: float | None = None, *, is_whole: bool = False) -> float:
    """Return a number, also from text ("1e-5")."""
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    is_low = minimum is not None and number < minimum
    if number != number or is_low or (is_whole and not number.is_integer()):
        bound = "" if minimum is None else f", at least {minimum:g}"
        raise ValueError(f"{name}={json.dumps(value)}: write a {'whole ' if is_whole else ''}number{bound}")
    return int(number) if is_whole else number


def _is_off(name: str, value: Any) -> bool:
    """Return whether a value switches a feature off. A size (of a group of ranks) does so at 1."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value is False or (name.endswith("_size") and value == 1)


def _section(name: str, value: Any) -> dict[str, Any]:
    """Return a section; empty for null and "auto"."""
    if value is None or value == "auto":
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={json.dumps(value)}: write a section, {{key: value, ...}}, or remove the key")
    return dict(value)


def _similar_key(name: str) -> str:
    """Return the hint for an unknown key: the most similar name, in its own section if possible."""
    section, _, leaf = name.rpartition(".")
    known = sorted([*KEYS, *TYPED, *sorted(SECTIONS)], key=lambda key: key.rpartition(".")[0] == section)
    return _hint(leaf, {key.rpartition(".")[2]: key for key in known}, "docs/reference/deepspeed.md lists all")


def _hint(name: str, known: Mapping[str, str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {known[close[0]]}?" if close else otherwise


def _require_known(names: Iterable[str], known: Iterable[str], section: str, what: str = "key") -> None:
    """Raise ValueError for the first name that is not known."""
    shown = {name: name for name in known}
    for name in names:
        if name not in shown:
            hint = _hint(name, shown, f"write one of {', '.join(shown)}")
            raise ValueError(f"{section}: DeepSpeed has no {what} {name}; {hint}")


# Translation


def _batch_sizes(values: Mapping[str, Any], ranks: int) -> tuple[int | None, int | None, int | None]:
    """Return (micro-batch size, accumulation steps, global batch size). Two of them determine the third."""
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
        total = micro * steps * ranks
    return micro, steps, total


def _loss_scale(fields: Mapping[str, Any], stage: int) -> LossScale:
    """Return DeepSpeed's loss scale. Its stage 0 has no hysteresis, and its constant scale 0 is none."""
    try:
        changed = {"static": fields.get("static") or None, **({"hysteresis": 1} if stage == 0 else {})}
        return LossScale(**{**fields, **changed})
    except ValueError as problem:
        raise ValueError(f"fp16: {problem}") from None


def _optimizer(section: Mapping[str, Any], base: OptimizerConfig | None) -> OptimizerConfig:
    """Translate the optimizer section. `base` has the values for "auto", the schedule, and which parameters decay."""
    _require_known(section, ("type", "params", "legacy_fusion"), "optimizer")
    kind, params = section.get("type"), _section("optimizer.params", section.get("params"))
    if not isinstance(kind, str):
        raise ValueError('optimizer.type is missing; write "AdamW", "Lion", "Adagrad", "SGD" or a class of torch.optim')
    reasons = {name.lower(): reason for name, reason in UNSUPPORTED_OPTIMIZERS.items()}
    if reason := reasons.get(kind.lower()):
        raise ValueError(f"optimizer.type={kind} is not supported: {reason}")
    if params.pop("max_grad_norm", None):
        raise ValueError("optimizer.params.max_grad_norm is not supported: write gradient_clipping at the top level")
    defaults = next((known for name, known in OPTIMIZERS.items() if name.lower() == kind.lower()), None)
    if defaults is not None:
        _require_known(params, defaults, "optimizer.params")
    else:
        try:
            optim.optimizer_class(kind)
        except ValueError as problem:
            raise ValueError(f"optimizer.type={kind}: {problem}") from None
    own = {} if base is None else {key: getattr(base, key) for key in ("lr", "betas", "eps", "weight_decay")}
    values = {"lr": 1e-3} | dict(defaults or {}) | ({"lr": own["lr"]} if own else {})
    values |= {k: own.get(k, values.get(k)) if v is None or v == "auto" else v for k, v in params.items()}
    lr, eps, decay = (
        _number(f"optimizer.params.{key}", values.get(key, default), 0.0)
        for key, default in (("lr", 1e-3), ("eps", 1e-8), ("weight_decay", 0.0))
    )
    name, options = _name_and_options(kind.lower(), values)
    frame = base or OptimizerConfig(lr=0.0, schedule="constant", decay="all")
    betas = _betas(values.get("betas", (0.9, 0.999)))
    return replace(frame, lr=lr, betas=betas, eps=eps, weight_decay=decay, name=name, options=options)


def _name_and_options(kind: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the optimizer here, and its arguments for which `OptimizerConfig` has no field."""
    if kind in optim.ADAMS:
        if not values["bias_correction"]:
            raise ValueError(
                "optimizer.params.bias_correction=false is not supported: Adam corrects its moments; write true"
            )
        # Without torch_adam, DeepSpeed's "Adam" decays as AdamW does unless adam_w_mode is false.
        is_decoupled = kind == "adamw" or (values["adam_w_mode"] and not values["torch_adam"])
        return "adamw" if is_decoupled else "adam", {"amsgrad": True} if values["amsgrad"] else {}
    if kind == "onebitadam":
        for key in ("amsgrad", "eps_inside_sqrt"):
            if values[key]:
                raise ValueError(f"optimizer.params.{key}=true is not supported by OneBitAdam; write false")
        return kind, {"freeze_step": int(_number("optimizer.params.freeze_step", values["freeze_step"], 1))}
    fields = ("lr", "weight_decay", "betas") if kind == "lion" else ("lr", "weight_decay")
    return kind, {key: value for key, value in values.items() if key not in fields}


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"optimizer.params.betas={json.dumps(value)}: write two numbers, [0.9, 0.999]")
    first, second = (_number("optimizer.params.betas", each, 0.0) for each in value)
    if max(first, second) >= 1.0:
        raise ValueError(f"optimizer.params.betas={json.dumps(value)}: both must be below 1")
    return first, second


def _scheduler(section: Mapping[str, Any], optimizer: OptimizerConfig) -> Callable[[int], float]:
    """Translate the scheduler section. "auto" stands for the optimizer's rate, warm-up and number of steps."""
    _require_known(section, ("type", "params"), "scheduler")
    kind, params = str(section.get("type")), _section("scheduler.params", section.get("params"))
    if kind in UNSUPPORTED_SCHEDULERS:
        raise ValueError(f"scheduler.type={kind} is not supported: {UNSUPPORTED_SCHEDULERS[kind]}")
    _require_known([kind], SCHEDULES, "scheduler.type", what="scheduler")
    params.pop("last_batch_iteration", None)
    known = parameters(SCHEDULES[kind])
    _require_known(params, known, "scheduler.params")
    auto = {
        "warmup_max_lr": optimizer.lr,
        "total_num_steps": optimizer.total_steps,
        "warmup_num_steps": optimizer.warmup_steps or 2,
        "warmup_min_lr": 0.0,
        "warmup_type": "log",
    }
    values: dict[str, Any] = {}
    for name, value in (known | {k: v for k, v in params.items() if v is not None}).items():
        is_open = value == "auto" or (value is None and name == "warmup_max_lr")
        values[name] = _scheduler_value(name, auto.get(name) if is_open else value)
    if kind == WarmupCosineLR.__name__:
        values["optimizer_lr"] = optimizer.lr
    return SCHEDULES[kind](**values).lr


def _scheduler_value(name: str, value: Any) -> Any:
    """Return a checked value. Numbers of steps are integers."""
    key = f"scheduler.params.{name}"
    if isinstance(value, list):
        raise ValueError(f"{key}={value}: write one number, for all parameters")
    if name == "total_num_steps" and value is None:
        raise ValueError(f"{key} is missing and has no default; write a number")
    if name == "warmup_type":
        if value not in ("log", "linear"):
            raise ValueError(f"{key}={value}: write log or linear")
        return value
    if value is None or not name.endswith("_steps"):
        return value if value is None else _number(key, value)
    return int(_number(key, value, 1.0 if name == "total_num_steps" else 0.0))
