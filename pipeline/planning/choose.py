"""The fastest setting that fits, by the probe's seconds: `engine=auto`, and the table of `stage=plan`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.memory import Demand
from engine.parallel import dist
from engine.planning import Pace, Probe, probe, step_seconds
from pipeline.config.schema import EngineSettings, RunConfig, StageSection
from pipeline.errors import UserError
from pipeline.files import write_whole
from pipeline.models.source import ModelSource
from pipeline.planning.fit import GIB, Task, beyond_settings, plan, require_fit, task, this_room
from pipeline.planning.ladder import Room, Setting, ladder
from pipeline.report.data import PLAN
from pipeline.stages.memory_limits import within_limits


@dataclass(frozen=True)
class Candidate:
    """A setting with its prediction."""

    setting: Setting
    demand: Demand
    seconds: dict[str, float]
    fits: bool

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def announce(
    config: RunConfig, stage: str, folder: Path, *, policy: ModelSource, reward: ModelSource | None = None
) -> tuple[RunConfig, dict[str, dict[str, int]]]:
    """Print the prediction at the start of a stage, on the leading rank; refuse on GPUs what can't fit.

    With `engine=auto` the fastest setting that fits is chosen first, or the one that this folder was begun with. Limits
    that an earlier start found by running out of memory (`pipeline.stages.memory_limits`) apply. The
    configuration to run with, and predicted bytes by phase and owner (empty where a model can't be predicted, which is
    said; it runs all the same).
    """
    world = dist.world()
    try:
        if config.engine.auto:
            config = _settled(config, stage, folder, policy, reward)
        config = within_limits(config, stage, folder)
        found = plan(config, stage, policy=policy, reward=reward, ranks=world.size)
    except UserError:
        raise
    except Exception as problem:
        if config.engine.auto:
            what = f"engine=auto: {policy.name} can't be predicted ({problem}); choose engine=zero2"
            raise UserError(what) from problem
        reason = str(problem).partition("\n")[0]
        _say([f"memory: not predicted for {policy.name} ({type(problem).__name__}: {reason})"])
        return config, {}
    _say(require_fit(found, refuse=world.device.type == "cuda"))
    if stage == "ppo":
        section = config.ppo.model_copy(update={"shared_forward": found.demand.shared})
        config = config.model_copy(update={"ppo": section})
    return config, found.demand.everywhere


def candidates(task: Task, room: Room, pace: Pace, measured: Probe) -> list[Candidate]:
    """Every setting of the ladder with its bytes and seconds, in the ladder's order."""
    found = []
    for setting in ladder(task.work, room):
        demand = task.demand(room, setting)
        asked = pace
        if demand.shared:  # what is scored by the forwards of training
            asked = replace(pace, policies=pace.policies - 1, scorers=pace.scorers - int(task.has_critic))
        seconds = step_seconds(
            task.policy, setting.of(task.work), asked, measured, on_gpu=room.on_gpu, critic=task.critic
        )
        found.append(Candidate(setting, demand, seconds, room.holds(demand)))
    return found


def fastest(found: Sequence[Candidate]) -> Candidate | None:
    """The fastest that fits; of equally fast ones (to a hundredth) the first of the ladder."""
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        return None
    least = min(candidate.total for candidate in fitting)
    return next(candidate for candidate in fitting if candidate.total <= 1.01 * least)


def pace_of(config: RunConfig, stage: str, task: Task) -> Pace:
    """What one step of a stage does."""
    section: StageSection = getattr(config, stage)
    if stage != "ppo":
        sides = 2 if stage in ("reward", "dpo") else 1
        return Pace(section.batch_size * sides, task.work.max_length)
    ppo, rollout = config.ppo, config.rollout
    return Pace(
        ppo.batch_size * ppo.samples,
        task.work.max_length,
        passes=ppo.update_epochs,
        updates=ppo.minibatches,
        critic=task.has_critic,
        policies=1 + int(task.has_reference),
        scorers=int(task.has_critic) + int(task.has_reward),
        answer=rollout.max_new_tokens,
        together=rollout.batch_size,
    )


def measure(config: RunConfig, task: Task) -> Probe:
    """The probe for a stage's model; every rank calls."""
    return probe(
        task.policy,
        dtype=task.work.dtype,
        length=task.work.max_length,
        rows=min(task.work.rollout_batch, 32),
        folder=config.engine.nvme_path,
        generates=task.generates,
        sequence=task.work.sequence,
    )


def _settled(config: RunConfig, stage: str, folder: Path, policy: ModelSource, reward: ModelSource | None) -> RunConfig:
    """The configuration with the setting that is kept in the folder, or chosen and kept there."""
    ranks = dist.world().size
    kept: dict[str, Any] | None = dist.broadcast_object(_read(folder / PLAN))
    if kept is not None and kept["ranks"] == ranks:
        _say([f"engine=auto: as this stage was begun: {kept['words']}"])
        return _with(config, stage, kept["engine"], kept["micro_batch_tokens"])
    found = task(config, stage, policy=policy, reward=reward, ranks=ranks)
    room = this_room(config.engine, ranks)
    measured = measure(config, found)
    possible = candidates(found, room, pace_of(config, stage, found), measured)
    best: Candidate | None = dist.broadcast_object(fastest(possible))
    if best is None:
        raise UserError(f"engine=auto: no setting fits {room.device / GIB:.1f} GiB a device; {beyond_settings(stage)}")
    words = best.setting.words(stage, found.work)
    _say([f"engine=auto: {words} ({best.demand.peak / GIB:.1f} GiB, about {best.total:.1f} s a step at full length)"])
    if dist.world().leads:
        record = {
            "ranks": ranks,
            "words": words,
            "engine": best.setting.engine,
            "micro_batch_tokens": best.setting.tokens,
            "seconds": best.seconds,
            "bytes": best.demand.phases,
            "probe": asdict(measured),
        }
        write_whole(folder / PLAN, json.dumps(record, indent=1) + "\n")
    dist.barrier()
    return _with(config, stage, best.setting.engine, best.setting.tokens)


def _with(config: RunConfig, stage: str, engine: dict[str, Any], tokens: int) -> RunConfig:
    settings = EngineSettings.model_validate({**config.engine.model_dump(), **engine, "auto": False})
    section = getattr(config, stage).model_copy(update={"micro_batch_tokens": tokens})
    return config.model_copy(update={"engine": settings, stage: section})


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _say(lines: Sequence[str]) -> None:
    if dist.world().leads:
        for line in lines:
            print(line, flush=True)
