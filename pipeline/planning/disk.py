"""Predict the disk space of a run: the checkpoints of its stages, and their exported models."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from engine.memory import checkpoint_bytes, model_bytes
from pipeline.config.messages import format_bytes
from pipeline.config.schema import RunConfig
from pipeline.planning.stage_task import StageTask
from pipeline.stages.stage_run import LARGE, SECONDS_BETWEEN_SAVES

ERROR = 2.0  # by which a stage may take longer than predicted


def stage_checkpoint(task: StageTask) -> int:
    """Return the bytes of one checkpoint of a stage, over all ranks."""
    return sum(checkpoint_bytes(m.shape, m.work) for m in task.models.values() if m.kind == "trained")


def most_checkpoints(config: RunConfig, task: StageTask, seconds: float) -> int:
    """Return how many checkpoints a stage of some seconds has on disk at a time.

    These are the newest ones that it retains, the one that is written, and the best one.
    """
    section = getattr(config, task.stage)
    keeps_best = section.export == "best" or (task.stage == "ppo" and config.ppo.guard in ("stop", "rollback"))
    by_clock = not section.save_every and stage_checkpoint(task) > LARGE
    written = 1 + ERROR * seconds / SECONDS_BETWEEN_SAVES if by_clock else math.inf
    return int(min(section.keep_checkpoints + 1, written)) + keeps_best


def run_bytes(config: RunConfig, tasks: Mapping[str, StageTask], seconds: Mapping[str, float]) -> int:
    """Return the use of the disk by the run folder when its last stage ends. `seconds`: those of each stage."""
    most = {stage: most_checkpoints(config, task, seconds[stage]) for stage, task in tasks.items()}
    return sum(
        most[stage] * stage_checkpoint(task) + model_bytes(task.policy.shape, task.policy.work)
        for stage, task in tasks.items()
    )


def warn_of_disk(config: RunConfig, task: StageTask, folder: Path, seconds: float) -> list[str]:
    """Return a warning if the disk of a stage's folder has no room for its checkpoints; [] if it has.

    seconds: the predicted time of the stage. The complete checkpoints of an earlier start are on the disk already.
    """
    stage, size, most = task.stage, stage_checkpoint(task), most_checkpoints(config, task, seconds)
    present = len(list((folder / "checkpoints").glob("step-*[0-9]")))
    free = shutil.disk_usage(folder).free
    needed = max(0, most - present) * size + model_bytes(task.policy.shape, task.policy.work)
    if needed <= free:
        return []
    fewer = f"set {stage}.keep_checkpoints=1, " if getattr(config, stage).keep_checkpoints > 1 else ""
    return [
        f"disk: a checkpoint of this stage has about {format_bytes(size)}, and up to {most} of them are on disk at a "
        f"time. With the exported model they need {format_bytes(needed)} more, but {folder} has {format_bytes(free)} "
        f"free: {fewer}free some space, or move the run folder to another disk and set run_dir= to it"
    ]
