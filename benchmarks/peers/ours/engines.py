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


def begin(work: Mapping[str, Any]) -> None:
    """Threads and the process group."""
    torch.set_num_threads(work["threads"])
    dist.start("bench", device="cpu")


def source(work: Mapping[str, Any], *, scores: bool = False) -> ModelSource:
    """Random weights of the shape."""
    fields = {**work["shape"], "num_labels": 1} if scores else dict(work["shape"])
    return ModelSource("bench", AutoConfig.for_model(**fields), None, 1, "sdpa", False)


def choice(work: Mapping[str, Any], *, learns: bool = True) -> EngineChoice:
    """fp32 masters, computing in the work's precision."""
    settings = EngineSettings(dtype=work["precision"], zero_stage=work.get("zero_stage", 0))
    optimizer = OptimizerConfig(lr=work["lr"], schedule="constant") if learns else None
    return EngineChoice(settings, optimizer)
