"""The settings that the planner chooses from, from the fastest to the leanest, and the memory that they have to fit in.

On a CPU host memory is the device's memory, so that only the NVMe tiers save memory.
"""

import os
import shutil
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.memory import VLLM_SEQUENCES, Rates, host_memory
from pipeline.config.messages import format_bytes
from pipeline.config.schema import EngineSettings
from pipeline.planning.demand import Demand, predict_bytes, predict_seconds, stage_seconds
from pipeline.planning.stage_task import StageTask

HEADROOM = 0.92  # the share of memory that a prediction may fill; fragmentation and libraries need the remainder


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


def measure_capacity(settings: EngineSettings, ranks: int) -> Capacity:
    """Measure this machine: the smallest device, and one rank's share of host memory and of the NVMe tiers' disk."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # The launcher counts the ranks of this machine. Slurm may show each of them its own GPU only.
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", min(ranks, devices) if devices else ranks))
    disk = shutil.disk_usage(settings.nvme_path or tempfile.gettempdir()).free // local_ranks
    host = host_memory().total // local_ranks
    # `mem_get_info` would create a CUDA context, about half a GiB, on the devices of all other ranks.
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(devices)]
    return Capacity(min(sizes, default=host), host, disk, bool(devices))


@dataclass(frozen=True)
class Prediction:
    """The prediction of a stage with one setting.

    `engine` has the keys of `engine` that the planner has chosen. `changes` are the command-line overrides that lead
    from the stage's configuration to this setting. `seconds` are those of a step by phase, and `stage_seconds` those of
    the stage; empty and 0 without rates.
    """

    task: StageTask
    capacity: Capacity
    demand: Demand
    engine: Mapping[str, Any]
    changes: tuple[str, ...]
    seconds: dict[str, float]
    stage_seconds: float

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        """Return whether the stage fits."""
        return self.capacity.fits(self.demand)

    @property
    def advice(self) -> "Prediction | None":
        """Return the first setting that fits; None if this one fits."""
        return None if self.fits else next((c for c in candidates(self.task, self.capacity) if c.fits), None)

    @property
    def summary(self) -> str:
        """One line: predicted bytes, the device's bytes, and the largest owners at the peak."""
        need = self.demand.peak + (0 if self.capacity.is_gpu else self.demand.host)
        peak = f"{self.demand.peak_phase}: {self.demand.largest_owners(4)}"
        available = format_bytes(self.capacity.device)
        return f"memory: about {format_bytes(need)} of {available} per device ({peak})"


def predict(
    task: StageTask,
    capacity: Capacity,
    rates: Rates | None = None,
    engine: Mapping[str, Any] | None = None,
    tokens: int = 0,
) -> Prediction:
    """Predict a stage, with other values of keys of `engine` and of `micro_batch_tokens` (0: as configured).

    PPO shares its forwards as configured, or where that fits. Raises ValueError for keys that exclude each other, such
    as bf16 states and an offloaded optimizer.
    """
    engine, tokens = engine or {}, tokens or task.work.micro_batch_tokens
    changes = {key: value for key, value in engine.items() if value != getattr(task.work.config, key)}
    overrides = [f"engine.{key}={str(value).lower()}" for key, value in changes.items()]
    if tokens != task.work.micro_batch_tokens:
        overrides.append(f"{task.stage}.micro_batch_tokens={tokens}")
    task = _with_decode_batch(task.with_setting(engine, tokens), capacity)
    demand, seconds, total = _demand(task, capacity), dict[str, float](), 0.0
    if rates is not None:
        seconds = predict_seconds(task, rates, shares_forward=demand.shares_forward)
        total = stage_seconds(task, rates, seconds)
    return Prediction(task, capacity, demand, engine, tuple(overrides), seconds, total)


def _demand(task: StageTask, capacity: Capacity) -> Demand:
    """Predict the bytes of a stage. PPO shares its forwards as configured, or where that fits."""
    demand = predict_bytes(task, free_bytes=capacity.device, shares_forward=task.shares_forward is not False)
    if task.shares_forward is None and not capacity.fits(demand):
        demand = predict_bytes(task, free_bytes=capacity.device)
    return demand


def _with_decode_batch(task: StageTask, capacity: Capacity) -> StageTask:
    """Return the task with as many sequences decoding at a time as fit next to the other bytes of the stage.

    The number is at least that of the task, and at most that of a rank's sequences (vLLM: VLLM_SEQUENCES).
    """
    if not task.fills_memory:
        return task

    def with_slots(slots: int) -> StageTask:
        return replace(task, load=replace(task.load, slots=slots))

    fewest, most = task.load.slots, min(task.load.sequences, VLLM_SEQUENCES if task.load.uses_vllm else sys.maxsize)
    shares = _demand(with_slots(fewest), capacity).shares_forward

    def exceeds(slots: int) -> bool:
        # Without a bound by free bytes, the cache has a slot for each of the sequences.
        return not capacity.fits(predict_bytes(with_slots(slots), shares_forward=shares))

    return with_slots(fewest + bisect_left(range(fewest + 1, most + 1), True, key=exceeds))


def candidates(task: StageTask, capacity: Capacity, rates: Rates | None = None) -> Iterator[Prediction]:
    """Yield every allowed setting with its prediction. The micro-batch is halved down to one item."""
    for engine in _layouts(task.work.ranks, is_gpu=capacity.is_gpu):
        if task.work.packed and (engine["zero_stage"] == 3 or engine["offload_optimizer"] != "none"):
            continue  # quantized models support neither
        for tokens in _micro_batch_sizes(task.work.micro_batch_tokens, task.work.min_tokens):
            with suppress(ValueError):  # such as a pipeline with stage 3
                yield predict(task, capacity, rates, engine, tokens)


def fastest(settings: Iterable[Prediction]) -> Prediction | None:
    """Return the fastest candidate that fits; among equally fast ones (within 1 %), the first."""
    fitting = [candidate for candidate in settings if candidate.fits]
    least = min((candidate.step_seconds for candidate in fitting), default=0.0)
    return next((candidate for candidate in fitting if candidate.step_seconds <= 1.01 * least), None)


def _micro_batch_sizes(tokens: int, least: int) -> Iterator[int]:
    """Yield the configured size and its halves down to `least`, the tokens of one item."""
    yield tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield tokens


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
