"""Error messages about configuration keys: one line with the key, what is wrong, and what to write instead."""

import difflib
import re
from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeline.config.schema import EngineSettings, TrackingSection

TRACKING = " or ".join(f"tracking={kind}" for kind in get_args(TrackingSection.model_fields["kind"].annotation))
OTHER_NAMES = {
    "resume": "run the same command again to resume",
    "gpus": "one process per GPU is the default, ranks=N sets another number",
    "output_dir": "run_dir=FOLDER, or name=NAME for runs/NAME",
    "dtype": "engine.dtype",
    "bf16": "engine.dtype=bf16",
    "fp16": "engine.dtype=fp16",
    "lora": "sft=lora, reward=lora, dpo=lora or ppo=lora",
    "deepspeed": "engine.deepspeed=FILE",
    "wandb": TRACKING,
    "dataset": "data=NAME, or data.path=FILE",
    "model_name_or_path": "model.path=FOLDER, or model.hub=NAME",
    "data.eval_path": '"data.sources=[{path: FILE, eval_path: FILE}]" instead of data.path',
    "dataset_name": "data.path=FILE, or data.sources=[{hub: NAME}]",
    "report_to": TRACKING,
    "use_vllm": "rollout.generator=vllm",
    "use_peft": "sft=lora, reward=lora, dpo=lora or ppo=lora",
    "lora_r": "sft.lora.rank, reward.lora.rank, dpo.lora.rank or ppo.lora.rank",
    "load_in_4bit": "model.quantize=nf4",
    "gradient_accumulation_steps": "remove the key: batch_size is global, and micro_batch_tokens bounds a forward pass",
    "resume_from_checkpoint": "run the same command again to resume",
    "ppo.beta": "the weight of the KL is ppo.kl_coef",
    "ppo.vf_coef": "remove the key: the critic is a model of its own, with ppo.critic_lr",
    "ppo.total_episodes": "ppo.steps, the number of rollouts of ppo.batch_size prompts",
    "ppo.mask_truncated_completions": "ppo.unfinished=mask",
    "engine.pipeline_schedule": "the schedule is always 1f1b, so remove the key",
    "rollout.selfcheck_every": "it is now called rollout.parity_check_every",
}
"""Keys of other tools and renamed keys -> what to write instead."""
ENGINE_NAMES = {
    r"(?<![\w.])generator=engine": "rollout.generator=engine",
    r"(?<![\w.])tensor_parallel(?==\d+ for generation)": "rollout.tensor_parallel",
    r"(?<![\w.])stream=[Tt]rue": "rollout.stream=true",
    r"(?<![\w.])tensor_plan": "model.tensor_plan",
}
"""Names in messages of the engine whose keys are in other sections -> configuration keys."""
OTHER_LEAVES = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "loss_type": "loss",
    "loss_mode": "loss",
    "epsilon_high": "clip_high",
    "delta": "dual_clip",
    "kl": "kl_coef",
    "kl_penalty": "kl_coef",
    "cliprange_value": "value_clip",
    "importance_sampling_level": "ratio",
    "vllm_importance_sampling_clip_max": "importance_cap",
    "vllm_importance_sampling_mode": "importance_weights",
    "steps_per_generation": "minibatches",
    "response_length": "max_new_tokens",
    "reward_funcs": "reward_function",
    "num_generations": "samples",
    "rpo_alpha": "sft_coef",
    "nll_loss_coef": "sft_coef",
    "num_iterations": "update_epochs",
    "scale_rewards": "divide_by_std",
    "epsilon": "clip",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup",
    "logging_steps": "log_every",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "gradient_checkpointing": "activation_checkpointing",
    "per_device_train_batch_size": "batch_size",
    "save_total_limit": "keep_checkpoints",
    "attn_implementation": "attention",
    "use_liger_kernel": "fused_kernels",
    "stage": "zero_stage",
    "r": "rank",
}
"""Names in other tools -> names in a section here."""


def messages(problem: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line for each key of `root` with a mistake."""
    lines: dict[str, str] = {}
    for error in problem.errors():
        key = ".".join(part for part in map(str, error["loc"]) if part not in ("str", "list[str]", "[key]"))
        lines.setdefault(key, _message(key, error, root))
    return list(lines.values())


def _message(key: str, error: ErrorDetails, root: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        return f"{key}: there is no such key{_advice_on_unknown(key, root)}"
    if error["type"] == "missing":
        return f"{key} is missing{_described(key, root)}"
    text = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if error["type"] == "model_type":
        text = f"it has keys of its own, as in {key}.KEY=VALUE"
    return f"{key}={as_written(error['input'])}: {text}{_described(key, root)}"


def unmet_need(setting: str, needed: str, actual: str) -> str:
    """Return the message about a setting that needs another one. `needed`: KEY=VALUE, or KEY for any other value."""
    needed = f"{needed}, not {actual}" if "=" in needed else f"another {needed} than {actual}"
    return f"{setting} needs {needed}: change one of the two"


def in_keys(message: str) -> str:
    """Return an error message of the engine with configuration keys for the fields of the engine: dtype=fp16 becomes
    engine.dtype=fp16.
    """
    for name, key in ENGINE_NAMES.items():
        message = re.sub(name, key, message)
    fields = "|".join(EngineSettings.model_fields)
    return re.sub(rf"(?<![\w.])({fields})(?= ?=|\b must be\b)", r"engine.\1", message)


def as_written(value: Any) -> str:
    """Return a value as a command line has it, shortened to 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if len(str(value)) <= 60 else str(value)[:57] + "..."


def format_time(seconds: float) -> str:
    """Return a time in hours, minutes or seconds: "12.3 h", "4.5 min", "38 s", "0.25 s"."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def format_bytes(count: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    gib = count / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{count / 2**20:.0f} MiB"


def _described(key: str, root: type[BaseModel]) -> str:
    description = describe(root).get(_without_index(key))
    return f" ({description})" if description else ""


def _advice_on_unknown(key: str, root: type[BaseModel]) -> str:
    """Return advice on an unknown key.

    In this order: a key of another tool, the same name in another section, a similar name in the section, a similar key
    in any section, the keys of the section.
    """
    parent, _, leaf = key.rpartition(".")
    if advice := OTHER_NAMES.get(key) or OTHER_NAMES.get(leaf):
        return f": {advice}"
    known = describe(root)
    leaf = OTHER_LEAVES.get(leaf, leaf)
    siblings = [name.rpartition(".")[2] for name in known if _parent(name) == _without_index(parent)]
    same = [name for name in known if name.rsplit(".", 1)[-1] == leaf and name.count(".") == 1]
    if same and leaf not in siblings:
        return f"; did you mean {', '.join(same[:-1]) + ' or ' if same[1:] else ''}{same[-1]}?"
    near = closest(leaf, siblings)
    if near:
        return f"; did you mean {parent}{parent and '.'}{near}?"
    anywhere = closest(key, [name for name in known if closest(leaf, [name.rpartition(".")[2]])])
    if anywhere:
        return f"; did you mean {anywhere}?"
    return (
        f"; {parent} has {', '.join(siblings)}"
        if siblings and parent
        else " (docs/reference/configuration.md lists all)"
    )


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _without_index(key: str) -> str:
    """Return a key with N in place of list indices: data.sources.0.path -> data.sources.N.path."""
    return ".".join("N" if part.isdigit() else part for part in key.split("."))


def describe(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Return the description of every dotted key of the schema; N stands for the index of a list.

    The description of a section is empty.
    """
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        found[key] = description_of(field)
        inner = inner_section(field.annotation)
        if inner is not None:
            found.update(describe(inner, f"{key}.N." if get_origin(field.annotation) is list else f"{key}."))
    return found


def description_of(field: FieldInfo) -> str:
    """Return the description of a key on one line. A section may have none."""
    return " ".join((field.description or "").split())


def indivisible(key: str, size: int, parts: int, over: str) -> str:
    """Return the message for a size that is no multiple of `parts`, with the nearest multiples."""
    lower, upper = size // parts * parts, (size // parts + 1) * parts
    choices = f"{key}={lower} or {upper}" if lower else f"{key}={upper}"
    return f"{key}={size} does not divide over {over}: {choices}"


def no_divisor(key: str, size: int, count: int, over: str) -> str:
    """Return the message for a size that does not divide `count`, with the sizes that do."""
    *smaller, largest = (n for n in range(1, count + 1) if count % n == 0)
    choices = f"{', '.join(map(str, smaller))} or {largest}" if smaller else f"{largest}"
    return f"{key}={size} does not divide the {over}: {key}={choices}"


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section in an annotation `X`, `X | None` or `list[X]`; None for plain values."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def is_text(annotation: Any) -> bool:
    """Return whether an annotation is `str` or `str | None`, with or without constraints."""
    is_union = get_origin(annotation) in (Union, UnionType)
    choices = get_args(annotation) if is_union else (annotation,)
    plain = {get_args(each)[0] if get_origin(each) is Annotated else each for each in choices}
    return str in plain and plain <= {str, type(None)}


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the most similar candidate, or None if no candidate is similar."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return near[0] if near else None
