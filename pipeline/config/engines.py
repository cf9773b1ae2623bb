"""The engine's keys: those of each of PPO's models, and what of them does not go together."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.config.messages import as_written, messages
from pipeline.config.schema import ROLE_ENGINES, EngineSettings, RunConfig
from pipeline.config.stages import wanted_stages

if TYPE_CHECKING:
    from engine import OptimizerConfig

TRAINED = ("actor_engine", "critic_engine")


def engine_settings(engine: EngineSettings, own: Mapping[str, Any]) -> EngineSettings:
    """The engine of one of PPO's models: the run's, changed by the keys of its own."""
    return EngineSettings.model_validate({**engine.model_dump(), **own})


def copies(config: RunConfig) -> Iterator[tuple[str, int]]:
    """By key how many ranks are to share a copy of a model, where one is shared."""
    own = {f"ppo.{name}": getattr(config.ppo, name) for name in ROLE_ENGINES if "ppo" in wanted_stages(config)}
    for key, changed in {"engine": {}, **own}.items():
        settings = engine_settings(config.engine, changed)
        stage, ranks = settings.zero_stage, settings.shard_ranks
        if settings.deepspeed is not None:
            from engine import deepspeed_json

            said = deepspeed_json.config_fields(settings.deepspeed, engine_fields(settings))
            stage, ranks = said["zero_stage"], said["shard_ranks"]
        if ranks is not None and (stage > 0 or settings.auto):
            yield key, ranks


def engine_fields(settings: EngineSettings) -> dict[str, Any]:
    """The keys as fields of an `engine.EngineConfig`, beside a DeepSpeed file; dtype as it is written, auto too."""
    from engine import LossScale  # imports torch

    alike = settings.model_dump(exclude={"auto", "deepspeed", "loss_scale_power", "loss_scale_window"})
    scale = LossScale(initial_power=settings.loss_scale_power, window=settings.loss_scale_window)
    return {**alike, "loss_scale": scale}


def deepspeed_for(config: Mapping[str, Any], optimizer: "OptimizerConfig | None") -> Mapping[str, Any]:
    """Return a DeepSpeed configuration for one model: without `optimizer` and `scheduler` if the model is frozen."""
    if optimizer is not None:
        return config
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def engine_mistakes(config: RunConfig) -> Iterable[str]:
    """A line for each thing that the engine's keys ask for and can't have."""
    for name in ROLE_ENGINES:
        own = getattr(config.ppo, name)
        try:
            merged = engine_settings(config.engine, own)
        except ValidationError as problem:
            for line in messages(problem, EngineSettings):
                yield f"ppo.{name}.{line}"
        else:
            if own:
                yield from _offload_mistakes(f"ppo.{name}", merged, trains=name in TRAINED)
                yield from _number_mistakes(f"ppo.{name}", merged)
                yield from _deepspeed_mistakes(f"ppo.{name}", merged, own, trains=name in TRAINED)
        if "tensor_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.tensor_parallel: the models of PPO are split alike; set engine.tensor_parallel"
        if "sequence_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.sequence_parallel: the models of PPO see the same rows; set engine.sequence_parallel"
        if "pipeline_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.pipeline_parallel: PPO has no pipelines; leave it out"
    yield from _offload_mistakes("engine", config.engine, trains=True)
    yield from _number_mistakes("engine", config.engine)
    yield from _deepspeed_mistakes("engine", config.engine, _changed(config.engine), trains=True)
    if config.engine.pipeline_parallel > 1:
        yield from _pipeline_mistakes(config)
    if config.engine.sequence_parallel > 1:
        yield from _sequence_mistakes(config)


def _offload_mistakes(key: str, settings: EngineSettings, *, trains: bool) -> Iterable[str]:
    """Tiers that don't go with the layout; a model that only computes has no optimizer to offload."""
    if settings.offload_parameters == "nvme" and settings.zero_stage != 3 and settings.deepspeed is None:
        yield f"{key}.offload_parameters=nvme needs {key}.zero_stage=3, not {settings.zero_stage}: engine=zero3-nvme"
    without = trains and settings.offload_optimizer == "none" and settings.deepspeed is None
    if settings.offload_parameters == "nvme" and without:
        yield f"{key}.offload_parameters=nvme needs {key}.offload_optimizer=nvme or cpu: engine=zero3-nvme"
    if settings.nvme_path is not None and not Path(settings.nvme_path).is_dir():
        yield f"{key}.nvme_path={settings.nvme_path}: there is no such folder"


def _number_mistakes(key: str, settings: EngineSettings) -> Iterable[str]:
    """Precisions, kept and sent, that don't go with the layout."""
    if settings.compress != "none" and settings.zero_stage == 0 and settings.deepspeed is None:
        yield f"{key}.compress={settings.compress} needs shards: engine=zero1, zero2 or zero3"
    if settings.states == "bf16" and settings.deepspeed is None:
        if settings.dtype != "bf16":
            yield f"{key}.states=bf16 needs {key}.dtype=bf16, not {settings.dtype}"
        if settings.offload_optimizer != "none" or settings.tensor_parallel > 1:
            yield f"{key}.states=bf16 needs {key}.offload_optimizer=none and {key}.tensor_parallel=1"


def _pipeline_mistakes(config: RunConfig) -> Iterable[str]:
    """What a model in pieces does not go with."""
    pieces, settings = f"engine.pipeline_parallel={config.engine.pipeline_parallel}", config.engine
    if config.stage != "plan" and wanted_stages(config) != ["sft"]:
        yield f"{pieces} is for supervised fine-tuning: stage=sft with it, then the other stages without"
    if settings.zero_stage == 3:
        yield f"{pieces} has parameters whole in each piece: engine=zero0, zero1 or zero2"
    needed: dict[str, Any] = {
        "deepspeed": None,
        "offload_optimizer": "none",
        "offload_parameters": "none",
        "compile_blocks": False,
        "compress": "none",
        "states": "fp32",
        "tensor_parallel": 1,
    }
    for key, value in needed.items():
        if getattr(settings, key) != value:
            yield f"{pieces} needs engine.{key}={as_written(value)}"
    if config.rollout.tensor_parallel > 1:
        yield f"{pieces} needs rollout.tensor_parallel=1: held-out prompts are answered on each rank by itself"


def _sequence_mistakes(config: RunConfig) -> Iterable[str]:
    """What rows that ranks share out do not go with."""
    shared, settings = f"engine.sequence_parallel={config.engine.sequence_parallel}", config.engine
    for key, value in {"tensor_parallel": 1, "pipeline_parallel": 1, "compile_blocks": False}.items():
        if getattr(settings, key) != value:
            yield f"{shared} needs engine.{key}={as_written(value)}"
    for name in ROLE_ENGINES:
        if getattr(config.ppo, name).get("compile_blocks"):
            yield f"{shared} needs ppo.{name}.compile_blocks=false"
    if not config.sft.packing and "sft" in wanted_stages(config):
        yield f"{shared} shares out packed rows: sft.packing=true"


def _changed(settings: EngineSettings) -> list[str]:
    """The keys that are not as they are by default."""
    return [name for name, field in EngineSettings.model_fields.items() if getattr(settings, name) != field.default]


def _deepspeed_mistakes(key: str, settings: EngineSettings, given: Collection[str], *, trains: bool) -> Iterable[str]:
    """A file and the `given` ones of our own keys that say two different things, or make no engine together."""
    if settings.deepspeed is None:
        return
    from engine import OptimizerConfig, deepspeed_json

    file = f"{key if 'deepspeed' in given else 'engine'}.deepspeed"
    own = engine_fields(settings) | {"dtype": "fp32" if settings.dtype == "auto" else settings.dtype}
    theirs = deepspeed_json.config_fields(settings.deepspeed, own)
    names = ("zero_stage", "dtype", "offload_optimizer", "offload_parameters", "nvme_path")
    if other := [name for name in names if name in given and theirs[name] != own[name]]:
        for name in other:
            yield (
                f"{key}.{name}={own[name]}, but {file} says {theirs[name]}: leave {key}.{name} out, "
                'or change the file ("auto" leaves it to engine.*)'
            )
        return
    try:
        optimizer = OptimizerConfig(lr=1e-5, total_steps=1) if trains else None
        deepspeed_json.parse(deepspeed_for(settings.deepspeed, optimizer), ranks=None, optimizer=optimizer, base=own)
    except ValueError as problem:
        yield f"{file if key == 'engine' else f'{key} with {file}'}: {problem}"
