"""Engines around random models of a given shape, as the stages build them."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from engine import OptimizerConfig
from engine.parallel import dist
from pipeline.config.schema import EngineSettings
from pipeline.models.build import EngineChoice
from pipeline.models.source import ModelSource


def start(task: Mapping[str, Any]) -> None:
    """Set the number of threads and start the process group."""
    torch.set_num_threads(task["threads"])
    dist.start("bench", device="cpu")


def model_source(task: Mapping[str, Any], *, scores: bool = False) -> ModelSource:
    """Return the source of a model with random weights of the task's shape."""
    fields = {**task["shape"], "num_labels": 1} if scores else dict(task["shape"])
    return ModelSource("bench", AutoConfig.for_model(**fields), None, 1, "sdpa", False)


def engine_choice(task: Mapping[str, Any], *, learns: bool = True) -> EngineChoice:
    """Return engine settings with fp32 masters and the task's precision, and an optimizer if the model `learns`."""
    settings = EngineSettings(dtype=task["precision"], zero_stage=task.get("zero_stage", 0))
    optimizer = OptimizerConfig(lr=task["lr"], schedule="constant") if learns else None
    return EngineChoice(settings, optimizer)
