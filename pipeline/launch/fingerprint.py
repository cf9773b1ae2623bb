"""What a stage depends on, as values that can be compared: settings, data, models.

Two kinds of keys are left out on purpose. Keys that say how a result is computed and not what it is (ranks,
ZeRO stage, offload, micro-batches: the update does not depend on them), so that a run that ran out of memory
goes on with smaller ones. And keys that only watch (tracking, logging, evaluation, checkpoints).
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.schema import ROLE_ENGINES, DataConfig, ModelConfig, RunConfig
from pipeline.data.files import find

WATCHING = {"log_every", "eval_every", "save_every", "keep_checkpoints", "eval_examples", "ratio_tolerance"}
WATCHING |= {"keep_answers", "keep_tokens"}
WATCHING |= {"reference"}  # what it is needed for is told by kl_coef
DECIDING = {"eval_every", "eval_examples"}  # of these, what chooses the model under export=best
HOW = {"micro_batch_tokens", "reward_threads", "shared_forward"}
HOW_ROLLOUTS = {"batch_size", "cache_bytes", "tensor_parallel", "stream", "keep", "park_optimizer"}
HOW_ROLLOUTS |= {"parity_check_every", "selfcheck_every"}  # the second is the former name
ENGINE_KEYS = ("dtype", "compress", "states", "loss_scale_power", "loss_scale_window")
DEEPSPEED_KEYS = ("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "bfloat16", "communication_data_type")
ZERO_KEYS = ("zero_quantized_weights", "zero_quantized_gradients")  # as engine.compress


class HashCache:
    """SHA-256 of files, remembered by size and time of change in one small JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known: dict[str, list[Any]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}

    def file(self, file: Path) -> str:
        """The SHA-256 of one file's bytes, in hexadecimal."""
        file = file.resolve()
        stat = file.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        known = self._known.get(str(file))
        if known is not None and known[:2] == stamp:
            return str(known[2])
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        self._known[str(file)] = [*stamp, digest]
        return digest

    def tree(self, place: Path) -> str:
        """The SHA-256 over names and contents of a folder's files (hidden ones left out), or of one file."""
        if place.is_file():
            return self.file(place)
        files = sorted(file for file in place.rglob("*") if file.is_file() and not _hidden(file.relative_to(place)))
        return digest({file.relative_to(place).as_posix(): self.file(file) for file in files})

    def save(self) -> None:
        """Keep what was learned; a cache that can't be written is no loss."""
        with contextlib.suppress(OSError):
            self._path.write_text(json.dumps(self._known), encoding="utf-8")


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def stage_settings(config: RunConfig, stage: str) -> dict[str, Any]:
    """The keys that matter to a stage's result, flat: {"seed": 1, "sft.lr": 1e-5, ...}."""
    whole = config.model_dump(mode="json")
    chosen: dict[str, Any] = {"seed": whole["seed"], "engine": {key: whole["engine"][key] for key in ENGINE_KEYS}}
    chosen["engine"] |= _deepspeed_settings(whole["engine"])
    chosen["model"] = _model_settings(config.model)
    if stage == "reward" and config.reward_model is not None:
        chosen["reward_model"] = _model_settings(config.reward_model)
    chosen["data"] = _data_settings(config.data)
    watching = WATCHING - DECIDING if whole[stage]["export"] == "best" else WATCHING
    section = {key: value for key, value in whole[stage].items() if key not in watching | HOW}
    for role in ROLE_ENGINES:
        if role in section:
            own = section[role]
            section[role] = {key: value for key, value in own.items() if key in ENGINE_KEYS} | _deepspeed_settings(own)
    chosen[stage] = section
    if stage == "ppo":
        section["reward_function"] = _absolute(config.ppo.reward_function)
        if config.ppo.export == "best":
            chosen["evaluation"] = {"prompts": config.evaluation.prompts}
        chosen["rollout"] = {key: value for key, value in whole["rollout"].items() if key not in HOW_ROLLOUTS}
    return flat(chosen)


def _deepspeed_settings(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What a DeepSpeed configuration changes of a result; its batch keys, and most of ZeRO's, don't."""
    file = engine.get("deepspeed")
    if not isinstance(file, Mapping):
        return {}
    said = {key: value for key, value in file.items() if key in DEEPSPEED_KEYS}
    zero = file.get("zero_optimization")
    sent = {key: zero[key] for key in ZERO_KEYS if zero.get(key)} if isinstance(zero, Mapping) else {}
    said |= {"zero_optimization": sent} if sent else {}
    return {"deepspeed": said} if said else {}


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. Empty dictionaries stay as values."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _model_settings(model: ModelConfig) -> dict[str, Any]:
    return {
        **model_source(model),
        "tokenizer": model.tokenizer,
        "chat_template": _absolute(model.chat_template),
        "attention": model.attention,
    }


def model_source(model: ModelConfig) -> dict[str, Any]:
    """Where a model comes from, for telling two apart: its folder, else its shape (random weights), else its hub id."""
    if model.path is not None:
        return {"weights": model.weights, "path": _absolute(model.path)}
    if model.weights == "random" and model.architecture is not None:
        return {"weights": "random", "architecture": digest(model.architecture)}
    return {"weights": model.weights, "hub": model.hub}


def data_source(data: DataConfig) -> dict[str, Any]:
    """Where data comes from: one path, or the sources with their paths spelt out."""
    if data.path is not None:
        return {"path": _absolute(data.path)}
    sources = [source.model_dump(mode="json") for source in data.sources]
    for source in sources:
        source["path"], source["eval_path"] = _absolute(source["path"]), _absolute(source["eval_path"])
    return {"sources": [{key: value for key, value in source.items() if value is not None} for source in sources]}


def _data_settings(data: DataConfig) -> dict[str, Any]:
    settings = data.model_dump(mode="json", exclude={"name", "path", "sources", "bad_row_limit", "demo_examples"})
    if any(source.builtin for source in data.sources) and data.path is None:
        settings["demo_examples"] = data.demo_examples
    return {**settings, **data_source(data)}


def _absolute(location: str | None) -> str | None:
    return None if location is None else str(Path(location).resolve())


def model_content(model: ModelConfig, cache: HashCache) -> str:
    """What a base model is: the content hash of its folder, or where it comes from."""
    if model.path is not None:
        return cache.tree(Path(model.path))
    source = model_source(model)
    return f"random:{source['architecture']}" if "architecture" in source else f"hub:{source['hub']}"


def data_content(data: DataConfig, cache: HashCache) -> str:
    """What the data is, as cheaply as it can be told: contents of local files, the description of anything else."""
    source = data_source(data)
    paths = [data.path] if data.path is not None else []
    if data.path is None:
        paths = [path for one in data.sources for path in (one.path, one.eval_path) if path is not None]
    contents = {path: cache.tree(found) for path in paths if (found := find(path)) is not None}
    return digest({"source": source, "contents": sorted(contents.values())})
