"""Compute comparable values for everything that a stage's result depends on: settings, data and models.

Two kinds of keys are excluded:
- Execution keys (ranks, ZeRO stage, offload, micro-batches). The update does not depend on them, so a run that ran
  out of memory resumes with smaller micro-batches.
- Monitoring keys (tracking, logging, evaluation, checkpoints).
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.schema import DataConfig, ModelConfig, RunConfig
from pipeline.config.stage_sections import ROLE_ENGINES
from pipeline.data.files import files_in
from pipeline.models.folder import model_folder

MONITORING_KEYS = {"log_every", "eval_every", "save_every", "keep_checkpoints", "eval_examples", "ratio_tolerance"}
MONITORING_KEYS |= {"keep_answers", "keep_tokens"}
MONITORING_KEYS |= {"reference"}  # kl_coef already decides whether the reference is used
MODEL_SELECTION_KEYS = {"eval_every", "eval_examples"}  # monitoring keys that decide which model export=best selects
PPO_SELECTION_KEYS = (
    "ppo.eval_every",
    "ppo.eval_examples",
    "evaluation.judge",
    "evaluation.prompts",
    "evaluation.temperatures",
)
"""Keys of the evaluations that PPO's training guard and export=best read."""
EXECUTION_KEYS = {"micro_batch_tokens", "reward_threads", "shared_forward"}
ROLLOUT_EXECUTION_KEYS = {"batch_size", "cache_bytes", "tensor_parallel", "stream", "keep", "park_optimizer"}
ROLLOUT_EXECUTION_KEYS |= {"parity_check_every"}
MODEL_EXECUTION_KEYS = {"fused_kernels", "trust_remote_code", "tensor_plan"}
MODEL_EXECUTION_KEYS |= {"name", "hub", "path", "weights", "architecture"}  # `model_source` identifies the model
ENGINE_KEYS = ("dtype", "compress", "states", "loss_scale_power", "loss_scale_window")
DEEPSPEED_KEYS = ("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "bfloat16", "communication_data_type")
ZERO_KEYS = ("zero_quantized_weights", "zero_quantized_gradients")  # the DeepSpeed equivalents of engine.compress


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal. This process reads an unchanged file once."""
    status = file.stat()
    return _hash_bytes(file.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _hash_bytes(file: Path, size: int, modified: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def hash_tree(path: Path) -> str:
    """Return the SHA-256 over names and contents of all files of a folder, without hidden files; or of one file."""
    if path.is_file():
        return hash_file(path)
    files = _visible_files(path)
    with ThreadPoolExecutor() as threads:  # one thread reads and hashes 0.5 to 2 GB per second
        return digest(dict(zip(files, threads.map(hash_file, files.values()), strict=True)))


def _visible_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder without hidden ones, by their names relative to the folder, sorted."""
    files = sorted(file for file in files_in(folder) if file.is_file() and not _is_hidden(file.relative_to(folder)))
    return {file.relative_to(folder).as_posix(): file for file in files}


def _is_hidden(relative: Path) -> bool:
    return any(name.startswith(".") for name in relative.parts)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def stage_settings(config: RunConfig, stage: str) -> dict[str, Any]:
    """Return the settings that a stage's result depends on, flattened: {"seed": 1, "sft.lr": 1e-5, ...}."""
    dump = config.model_dump(mode="json")
    settings: dict[str, Any] = {"seed": dump["seed"], "engine": {key: dump["engine"][key] for key in ENGINE_KEYS}}
    settings["engine"] |= _deepspeed_settings(dump["engine"])
    settings["model"] = _model_settings(config.model)
    if stage == "reward" and config.reward_model is not None:
        settings["reward_model"] = _model_settings(config.reward_model)
    settings["data"] = _data_settings(config.data)
    selects = getattr(config, stage).selects_best
    monitoring_keys = MONITORING_KEYS - MODEL_SELECTION_KEYS if selects else MONITORING_KEYS
    section = {key: value for key, value in dump[stage].items() if key not in monitoring_keys | EXECUTION_KEYS}
    for role in ROLE_ENGINES:
        if role in section:
            engine = section[role]
            shared = {key: value for key, value in engine.items() if key in ENGINE_KEYS}
            if "deepspeed" in engine:  # a file of its own, or null instead of the file of `engine`
                own = config.engine.changed_by(engine)
                shared["deepspeed"] = _deepspeed_settings({"deepspeed": own.deepspeed}).get("deepspeed")
            section[role] = shared
    settings[stage] = section
    if stage == "ppo":
        section["reward_function"] = _absolute(config.ppo.reward_function)
        section["reward_ensemble"] = [_absolute(folder) for folder in config.ppo.reward_ensemble]
        if config.ppo.ptx_coef:
            settings["sft"] = {key: dump["sft"][key] for key in ("max_length", "loss_on")}
        if selects:
            settings["evaluation"] = {key: dump["evaluation"][key] for key in ("prompts", "temperatures")}
            settings["evaluation"]["judge"] = _absolute(config.evaluation.judge)
        settings["rollout"] = {
            key: value for key, value in dump["rollout"].items() if key not in ROLLOUT_EXECUTION_KEYS
        }
    return flatten(settings)


def with_selected(inputs: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a stage with what `auto` selects there, so that a command may name it instead of `auto`.

    plan: the stage's plan.json. For `reward.init` the role of the model is used.
    """
    selected = {**plan.get("auto", {}), "reward.init": next(iter(inputs["models"]))}
    settings = {
        key: selected.get(key, value) if value == "auto" else value for key, value in inputs["settings"].items()
    }
    return {**inputs, "settings": settings, "config": digest(settings)}


def _deepspeed_settings(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a DeepSpeed configuration that change a result. Batch keys and most ZeRO keys do not."""
    file = engine.get("deepspeed")
    if not isinstance(file, Mapping):
        return {}
    settings = {key: value for key, value in file.items() if key in DEEPSPEED_KEYS}
    zero = file.get("zero_optimization")
    quantization = {key: zero[key] for key in ZERO_KEYS if zero.get(key)} if isinstance(zero, Mapping) else {}
    settings |= {"zero_optimization": quantization} if quantization else {}
    return {"deepspeed": settings} if settings else {}


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping: {"a": {"b": 1}} -> {"a.b": 1}. An empty mapping remains a value."""
    flattened: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flattened.update(flatten(value, f"{prefix}{key}."))
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


def _model_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of a model. Keys that records of earlier versions lack are left out at their default."""
    fields = ModelConfig.model_fields.items()
    changed = {key: getattr(model, key) for key, field in fields if getattr(model, key) != field.default}
    return {
        **{key: value for key, value in changed.items() if key not in MODEL_EXECUTION_KEYS},
        **model_source(model),
        "tokenizer": model.tokenizer,
        "chat_template": _absolute(model.chat_template),
        "attention": model.attention,
    }


def model_source(model: ModelConfig) -> dict[str, Any]:
    """Return the source that identifies a model: its folder, the hash of its architecture, or its hub id.

    The architecture identifies a model with random weights.
    """
    if model.path is not None:
        return {"weights": model.weights, "path": _absolute(model.path)}
    if model.weights == "random" and model.architecture is not None:
        return {"weights": "random", "architecture": digest(model.architecture)}
    return {"weights": model.weights, "hub": model.hub}


def data_source(data: DataConfig) -> dict[str, Any]:
    """Return where the data comes from, with absolute paths: one path, or the list of sources."""
    if data.path is not None:
        return {"path": _absolute(data.path)}
    sources = [source.model_dump(mode="json", exclude={"size"}) for source in data.sources]
    for source in sources:
        source["path"], source["eval_path"] = _absolute(source["path"]), _absolute(source["eval_path"])
    return {"sources": [{key: value for key, value in source.items() if value is not None} for source in sources]}


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Return the model and the data set that a run folder belongs to, with their names and sources."""
    return {
        "model": {"name": config.model.name, "source": model_source(config.model)},
        "data": {"name": config.data.name, "source": data_source(config.data)},
    }


def hash_request(config: RunConfig, stages: list[str]) -> str:
    """Return a hash of the stages and settings of a command, to find an unfinished run of the same command.

    Settings at their defaults are left out, so that a new key of a later version does not change the hash.
    """
    default_settings = flatten(RunConfig.defaults())
    settings = {
        stage: {
            key: value for key, value in stage_settings(config, stage).items() if value != default_settings.get(key)
        }
        for stage in stages
    }
    models = {"actor": config.actor, "reward": config.reward_path}
    models |= {} if config.teacher is None else {"teacher": config.teacher}
    return digest({"stages": settings, **models})


def _data_settings(data: DataConfig) -> dict[str, Any]:
    settings = data.model_dump(
        mode="json", exclude={"name", "path", "sources", "bad_row_limit", "demo_examples", "task"}
    )
    generated = {source.builtin for source in data.sources} if data.path is None else set()
    if "demo" in generated:
        settings["demo_examples"] = data.demo_examples
    if "tasks" in generated:
        settings["task"] = data.task.model_dump(mode="json")
    return {**settings, **data_source(data)}


def _absolute(location: str | None) -> str | None:
    return None if location is None else str(Path(location).resolve())


def model_content(model: ModelConfig) -> str:
    """Return the content hash of a base model's folder; without a folder, a string that names its source."""
    if model.path is not None:
        return hash_tree(model_folder(model.path, "model.path"))
    source = model_source(model)
    return f"random:{source['architecture']}" if "architecture" in source else f"hub:{source['hub']}"


def tokenizer_content(model: ModelConfig) -> str | None:
    """Return a hash of the local files that a run's tokenizer is made of; None if it is made of the data.

    The files are those of `model.chat_template`, and of `model.tokenizer` or the model's folder without its weights.
    """
    files = {}
    if model.tokenizer is not None:
        folder = None if model.tokenizer == "train" else Path(model.tokenizer).expanduser()
    else:
        folder = None if model.path is None else model_folder(model.path, "model.path")
    if folder is not None and folder.exists():  # else it is on the hub
        weights = (".safetensors", ".safetensors.index.json")
        names = {name: file for name, file in _visible_files(folder).items() if not name.endswith(weights)}
        files["folder"] = digest({name: hash_file(file) for name, file in names.items()})
    if model.chat_template is not None:
        files["chat_template"] = hash_file(Path(model.chat_template))
    return digest(files) if files else None


def data_content(data: DataConfig) -> str:
    """Return a hash of the data: the contents of local files, and the description of all other sources."""
    return digest({"source": data_source(data), "contents": sorted(file_contents(data))})


def file_contents(data: DataConfig) -> list[str]:
    """Return the content hashes of the local files and folders of the data, in the order of the sources."""
    paths = [path for source in data.sources for path in (source.path, source.eval_path) if path is not None]
    paths = paths if data.path is None else [data.path]
    return [hash_tree(local) for path in dict.fromkeys(paths) if (local := Path(path)).exists()]
