"""Start a stage after its data is read: plan its settings, arrange the ranks and open its folder."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import Engine, distributed
from pipeline.config.schema import RunConfig
from pipeline.models.source import ModelSource
from pipeline.planning.planner import announce
from pipeline.stages.settings import log_steps, stage_steps
from pipeline.stages.stage_run import StageRun
from pipeline.tracking.watchers import open_watchers


@dataclass(frozen=True)
class StagePlan:
    """The settings that a stage runs with.

    config: the configuration, with the settings that `engine=auto` chose
    predicted: bytes by phase and owner; empty if the memory of the model cannot be predicted
    """

    config: RunConfig
    steps: int
    predicted: Mapping[str, Mapping[str, int]]


def plan_stage(
    config: RunConfig,
    stage: str,
    folder: Path,
    examples: int,
    *,
    policy: ModelSource,
    reward: ModelSource | None = None,
) -> StagePlan:
    """Log the number of steps and the predicted memory, choose settings for `engine=auto`, and seed torch."""
    section = getattr(config, stage)
    steps = stage_steps(section, examples)
    log_steps(stage, section, steps, examples)
    arrange_ranks(config)
    config, predicted = announce(config, stage, folder, policy=policy, reward=reward)
    return StagePlan(config, steps, predicted)


def arrange_ranks(config: RunConfig) -> None:
    """Group the ranks that share one model, and seed torch. Ranks of a tensor-parallel group have the same seed."""
    settings = config.engine
    world = distributed.set_parallelism(
        tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel, sequence=settings.sequence_parallel
    )
    torch.manual_seed(config.seed * 1_000_003 + world.rank // world.tensor)


@contextmanager
def open_stage(
    plan: StagePlan,
    stage: str,
    folder: Path,
    engines: Mapping[str, Engine],
    *,
    best_metric: str,
    longest: int,
    frozen: Mapping[str, Engine] | None = None,
    extra: Callable[[], dict[str, Any]] = dict,
    take: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Iterator[StageRun]:
    """Open the folder of a stage with its progress display and trackers. The arguments are those of `StageRun`."""
    section = getattr(plan.config, stage)
    with (
        open_watchers(plan.config, stage, folder, plan.steps) as watchers,
        StageRun(
            folder,
            section,
            plan.steps,
            engines,
            watchers=watchers,
            longest=longest,
            frozen=frozen,
            profile=plan.config.profile,
            decides=best_metric,
            extra=extra,
            take=take,
        ) as stage_run,
    ):
        stage_run.predicted = plan.predicted
        yield stage_run
