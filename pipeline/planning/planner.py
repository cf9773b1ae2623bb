"""Before a stage starts: predict whether it fits in memory, and choose the setting with `engine=auto`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.messages import format_bytes
from pipeline.config.schema import EngineSettings, RunConfig
from pipeline.distributed import barrier, broadcast_from_rank_zero, device, is_rank_zero, rank_count
from pipeline.errors import UserError
from pipeline.files import PLAN, write_whole
from pipeline.models.source import ModelSource
from pipeline.planning.candidates import Candidate, Capacity, candidates, fastest, measure_capacity
from pipeline.planning.demand import TIERS, Demand
from pipeline.planning.stage_task import StageTask, stage_task
from pipeline.stages.restart import within_limits

if TYPE_CHECKING:
    from engine.memory import Probe


@dataclass(frozen=True)
class Plan:
    """The prediction of one stage."""

    task: StageTask
    demand: Demand
    capacity: Capacity

    @property
    def fits(self) -> bool:
        """Return whether the configured setting fits."""
        return self.capacity.fits(self.demand)

    @property
    def advice(self) -> Candidate | None:
        """Return the first setting that fits; None if the configured one fits."""
        if self.fits:
            return None
        return next((candidate for candidate in candidates(self.task, self.capacity) if candidate.fits), None)

    @property
    def summary(self) -> str:
        """One line: predicted bytes, the device's bytes, and the largest owners at the peak."""
        need = self.demand.peak + (0 if self.capacity.is_gpu else self.demand.host)
        phase = self.demand.peak_phase
        on_device = [item for item in self.demand.phases[phase].items() if item[0] not in TIERS]
        largest = sorted(on_device, key=lambda item: -item[1])[:4]
        owners = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in largest)
        available = format_bytes(self.capacity.device)
        return f"memory: about {format_bytes(need)} of {available} a device ({phase}: {owners})"


def plan(
    config: RunConfig,
    stage: str,
    *,
    policy: ModelSource,
    reward: ModelSource | None = None,
    ranks: int,
    capacity: Capacity | None = None,
) -> Plan:
    """Predict a stage on `ranks` ranks with `capacity` (default: this machine's). Models as in `stage_task`."""
    capacity = capacity or measure_capacity(config.engine, ranks)
    task = stage_task(config, stage, policy=policy, reward=reward, ranks=ranks, is_cpu=not capacity.is_gpu)
    return Plan(task, capacity.demand(task), capacity)


def announce(
    config: RunConfig, stage: str, folder: Path, *, policy: ModelSource, reward: ModelSource | None = None
) -> tuple[RunConfig, dict[str, dict[str, int]]]:
    """Print the prediction of a stage; on a GPU, raise UserError if the stage does not fit. Every rank calls.

    Return the configuration to run with, and the predicted bytes by phase and owner (empty for a model that cannot be
    predicted, which trains without a prediction). `engine=auto` chooses the fastest setting that fits; a stage that
    resumes uses the setting that it started with. Limits that an earlier start found by running out of memory apply
    (`pipeline.stages.restart`).
    """
    try:
        if config.engine.auto:
            config = _choose_setting(config, stage, folder, policy, reward)
        config = within_limits(config, stage, folder)
        planned = plan(config, stage, policy=policy, reward=reward, ranks=rank_count())
    except UserError:
        raise
    except Exception as problem:
        if config.engine.auto:
            reason = f"engine=auto: the memory of {policy.name} cannot be predicted ({problem})"
            raise UserError(f"{reason}; choose a setting, such as engine=zero2") from problem
        reason = str(problem).partition("\n")[0]
        _print([f"memory: no prediction for {policy.name} ({type(problem).__name__}: {reason})"])
        return config, {}
    _print(check_fit(planned, refuse=device().type == "cuda"))
    if stage == "ppo":
        section = config.ppo.model_copy(update={"shared_forward": planned.demand.shares_forward})
        config = config.model_copy(update={"ppo": section})
    phases = planned.demand.phases.items()
    return config, {phase: {owner: size for owner, size in sizes.items() if size >= 0} for phase, sizes in phases}


def check_fit(planned: Plan, *, refuse: bool) -> list[str]:
    """Return the lines to print before a stage. Raises UserError if it exceeds the memory and `refuse` is True."""
    if planned.fits:
        return [planned.summary]
    candidate = planned.advice
    if candidate is None:
        advice = f"No engine setting fits; use {more_memory(planned.task.stage)}"
    else:
        advice = f"This setting fits: {candidate.changes}"
    is_close = planned.demand.peak <= planned.capacity.device
    if refuse and not is_close:
        raise UserError(f"{planned.summary}: the stage does not fit. {advice}")
    return [planned.summary, f"memory: the prediction {'almost fills' if is_close else 'exceeds'} the device. {advice}"]


def more_memory(stage: str) -> str:
    """Return what a user can change where no engine setting fits."""
    return f"more ranks (ranks=N), adapters ({stage}.lora.rank=16) or a smaller model (model=NAME)"


def measure(config: RunConfig, task: StageTask) -> "Probe":
    """Measure the speed of this machine for a stage's model; every rank calls."""
    from engine.memory import measure_speed

    return measure_speed(
        task.policy,
        dtype=task.work.config.dtype,
        length=task.work.max_length,
        rows=min(task.load.slots, 32),
        folder=config.engine.nvme_path,
    )


def _choose_setting(
    config: RunConfig, stage: str, folder: Path, policy: ModelSource, reward: ModelSource | None
) -> RunConfig:
    """Return the configuration with the setting in the folder's plan.json, or choose one and write it there."""
    ranks = rank_count()
    record: dict[str, Any] | None = broadcast_from_rank_zero(_read(folder / PLAN))
    if record is not None and record["ranks"] == ranks:
        _print([f"engine=auto: the setting that this stage started with: {record['words']}"])
        return _configured(config, stage, record)
    planned = plan(config, stage, policy=policy, reward=reward, ranks=ranks)
    probe = measure(config, planned.task)
    best: Candidate | None = broadcast_from_rank_zero(fastest(candidates(planned.task, planned.capacity, probe)))
    if best is None:
        size = format_bytes(planned.capacity.device)
        raise UserError(f"engine=auto: no setting fits in {size} a device; use {more_memory(stage)}")
    peak = format_bytes(best.demand.peak)
    _print([f"engine=auto: {best.changes} ({peak}, about {best.step_seconds:.1f} s a step with full-length sequences)"])
    record = {
        "ranks": ranks,
        "words": best.changes,
        "engine": best.engine,
        "micro_batch_tokens": best.micro_batch_tokens,
        "seconds": best.seconds,
        "bytes": best.demand.phases,
        "probe": asdict(probe),
    }
    if is_rank_zero():
        write_whole(folder / PLAN, json.dumps(record, indent=1) + "\n")
    barrier()
    return _configured(config, stage, record)


def _configured(config: RunConfig, stage: str, record: Mapping[str, Any]) -> RunConfig:
    engine = EngineSettings.model_validate({**config.engine.model_dump(), **record["engine"], "auto": False})
    section = getattr(config, stage).model_copy(update={"micro_batch_tokens": record["micro_batch_tokens"]})
    return config.model_copy(update={"engine": engine, stage: section})


def _read(file: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _print(lines: Sequence[str]) -> None:
    for line in lines if is_rank_zero() else ():
        print(line, flush=True)
