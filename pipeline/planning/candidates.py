"""The settings that the planner chooses from, from the fastest to the leanest, and the memory that they have to fit in.

On a CPU host memory is the device's memory, so that only the NVMe tiers save memory.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.memory import Probe
from pipeline.config.schema import EngineSettings
from pipeline.planning.demand import Demand, predict_bytes, predict_seconds
from pipeline.planning.stage_task import StageTask

HEADROOM = 0.92  # the share of memory that a prediction may fill; fragmentation and libraries need the rest


@dataclass(frozen=True)
class Capacity:
    """Bytes that one rank may use: on its device, in host memory, on disk. On a CPU the device is the host."""

    device: int
    host: int
    disk: int
    is_gpu: bool

    def fits(self, demand: Demand) -> bool:
        """Return whether a prediction fits."""
        on_device = demand.peak if self.is_gpu else demand.peak + demand.host
        on_host = demand.host if self.is_gpu else 0
        limits = ((on_device, self.device), (on_host, self.host), (demand.nvme, self.disk))
        return all(size <= HEADROOM * limit for size, limit in limits)

    def demand(self, task: StageTask) -> Demand:
        """Predict a stage. PPO shares its forwards as configured, or where that fits."""
        demand = predict_bytes(task, free_bytes=self.device, shares_forward=task.shares_forward is not False)
        if task.shares_forward is not None or self.fits(demand):
            return demand
        return predict_bytes(task, free_bytes=self.device)


def measure_capacity(settings: EngineSettings, ranks: int) -> Capacity:
    """Measure this machine: the smallest device, and one rank's share of host memory and of the NVMe tiers' disk.

    Raises FileNotFoundError where `settings.nvme_path` does not exist.
    """
    folder = settings.nvme_path
    if folder is not None and not Path(folder).exists():
        raise FileNotFoundError(f"engine.nvme_path={folder}: the folder does not exist; make it, or name another one")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_ranks = min(ranks, devices) if devices else ranks
    disk = shutil.disk_usage(folder or tempfile.gettempdir()).free // local_ranks
    host = psutil.virtual_memory().total // local_ranks
    sizes = [torch.cuda.mem_get_info(index)[1] for index in range(devices)]
    return Capacity(min(sizes, default=host), host, disk, bool(devices))


@dataclass(frozen=True)
class Setting:
    """Values of four keys of `engine`, and of the stage's `micro_batch_tokens`."""

    engine: dict[str, Any]
    micro_batch_tokens: int

    def applied_to(self, task: StageTask) -> StageTask:
        """Return the stage under this setting. Raises ValueError where the engine's other fields forbid the setting."""
        config = replace(task.work.config, **self.engine)
        return replace(task, work=replace(task.work, config=config, micro_batch_tokens=self.micro_batch_tokens))

    def changes(self, task: StageTask) -> str:
        """Return the command-line overrides that lead from a stage's configuration to this setting."""
        config, work = task.work.config, task.work
        changed = [(key, value) for key, value in self.engine.items() if value != getattr(config, key)]
        overrides = [f"engine.{key}={str(value).lower()}" for key, value in changed]
        if self.micro_batch_tokens != work.micro_batch_tokens:
            overrides.append(f"{task.stage}.micro_batch_tokens={self.micro_batch_tokens}")
        return " ".join(overrides) or "as configured"


def settings(task: StageTask, *, is_gpu: bool) -> Iterator[tuple[Setting, StageTask]]:
    """Yield every allowed setting with the stage under it. The micro-batch is halved down to one item."""
    for engine in _layouts(task.work.ranks, is_gpu=is_gpu):
        tokens = task.work.micro_batch_tokens
        while True:
            setting = Setting(engine, tokens)
            try:
                yield setting, setting.applied_to(task)
            except ValueError:  # such as a pipeline with stage 3, or bf16 states with an offloaded optimizer
                break
            if tokens <= task.work.min_tokens:
                break
            tokens = max(task.work.min_tokens, tokens // 2)


def _layouts(ranks: int, *, is_gpu: bool) -> Iterator[dict[str, Any]]:
    stages = (0, 1, 2, 3) if ranks > 1 else (0,)
    for stage in stages:
        yield _layout(stage)
    for stage in stages[-2:]:
        yield _layout(stage, checkpointing=True)
    for tier in ("cpu", "nvme") if is_gpu else ("nvme",):
        stage = 2 if ranks > 1 else 0
        yield _layout(stage, optimizer=tier)
        yield _layout(stage, optimizer=tier, checkpointing=True)
        yield _layout(3, optimizer=tier, parameters=tier, checkpointing=True)


def _layout(
    stage: int, *, optimizer: str = "none", parameters: str = "none", checkpointing: bool = False
) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "offload_optimizer": optimizer,
        "offload_parameters": parameters,
        "activation_checkpointing": checkpointing,
    }


@dataclass(frozen=True)
class Candidate:
    """A setting with its predicted bytes and seconds by phase."""

    setting: Setting
    demand: Demand
    seconds: dict[str, float]
    fits: bool

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def candidates(task: StageTask, capacity: Capacity, probe: Probe | None) -> list[Candidate]:
    """Predict every setting, from the fastest to the leanest; without a probe, bytes alone."""
    found = []
    for setting, changed in settings(task, is_gpu=capacity.is_gpu):
        demand = capacity.demand(changed)
        seconds = {}
        if probe is not None:
            shared = demand.shares_forward
            seconds = predict_seconds(changed, probe, is_gpu=capacity.is_gpu, shares_forward=shared)
        found.append(Candidate(setting, demand, seconds, capacity.fits(demand)))
    return found


def fastest(found: list[Candidate]) -> Candidate | None:
    """Return the fastest candidate that fits; among equally fast ones (within 1 %), the first."""
    fitting = [candidate for candidate in found if candidate.fits]
    least = min((candidate.step_seconds for candidate in fitting), default=0.0)
    return next((candidate for candidate in fitting if candidate.step_seconds <= 1.01 * least), None)
