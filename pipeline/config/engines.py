"""The engine's keys: those of each of PPO's models, and what of them does not go together."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.messages import as_written, messages
from pipeline.config.schema import ROLE_ENGINES, EngineSettings, RunConfig
from pipeline.config.stages import wanted_stages

TRAINED = ("actor_engine", "critic_engine")


def engine_settings(engine: EngineSettings, own: Mapping[str, Any]) -> EngineSettings:
    """The engine of one of PPO's models: the run's, changed by the keys of its own."""
    return EngineSettings.model_validate({**engine.model_dump(), **own})


def engine_mistakes(config: RunConfig) -> Iterable[str]:
    """A line for each thing that the engine's keys ask for and can't have."""
    for name in ROLE_ENGINES:
        try:
            merged = engine_settings(config.engine, getattr(config.ppo, name))
        except ValidationError as problem:
            for line in messages(problem, EngineSettings):
                yield f"ppo.{name}.{line}"
        else:
            if getattr(config.ppo, name):
                yield from _offload_mistakes(f"ppo.{name}", merged, trains=name in TRAINED)
                yield from _number_mistakes(f"ppo.{name}", merged)
        if "tensor_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.tensor_parallel: the models of PPO are split alike; set engine.tensor_parallel"
        if "sequence_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.sequence_parallel: the models of PPO see the same rows; set engine.sequence_parallel"
        if "pipeline_parallel" in getattr(config.ppo, name):
            yield f"ppo.{name}.pipeline_parallel: PPO has no pipelines; leave it out"
    yield from _offload_mistakes("engine", config.engine, trains=True)
    yield from _number_mistakes("engine", config.engine)
    yield from _deepspeed_mistakes(config.engine)
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
        "deepspeed": None, "offload_optimizer": "none", "offload_parameters": "none",
        "compile_blocks": False, "compress": "none", "states": "fp32", "tensor_parallel": 1,
    }  # fmt: skip
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


def _deepspeed_mistakes(settings: EngineSettings) -> Iterable[str]:
    """A file and our keys that say two different things."""
    if settings.deepspeed is None:
        return
    from engine import EngineConfig
    from engine.deepspeed import read

    keys = ("zero_stage", "dtype", "offload_optimizer", "offload_parameters", "nvme_path")
    own: dict[str, Any] = {key: getattr(settings, key) for key in keys}
    said = {key: value for key, value in own.items() if value != EngineSettings.model_fields[key].default}
    file = {key: value for key, value in settings.deepspeed.items() if key not in ("optimizer", "scheduler")}
    theirs = read(file, ranks=None, base=EngineConfig(**said)).engine
    for key, value in said.items():
        if getattr(theirs, key) != value:
            yield (
                f"engine.{key}={value}, but engine.deepspeed says {getattr(theirs, key)}: leave engine.{key} out, "
                'or change the file ("auto" leaves it to engine.*)'
            )
