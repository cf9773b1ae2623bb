"""`stage=plan`: hours, memory and cost of a run, and the settings worth choosing between, without training.

The plan reads no weights and contacts no hub. It is for this machine, whose speed is measured, or for the GPUs that
`plan.device` names, whose speed is tabulated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from engine import distributed
from engine.memory import GPUS, Rates, tabulated_rates
from pipeline.config.messages import format_time
from pipeline.config.schema import ModelConfig, RunConfig
from pipeline.config.stages import stages_to_run
from pipeline.errors import UserError
from pipeline.models.source import ModelSource, resolve
from pipeline.planning.candidates import Capacity, Prediction, candidates, fastest, measure_capacity, predict
from pipeline.planning.data_size import DataSize, data_sizes
from pipeline.planning.demand import run_bytes
from pipeline.planning.planner import measure, more_memory
from pipeline.planning.stage_task import PlanInputs, StageTask, stage_task
from pipeline.stages.data import on_rank_zero

GIB = 2**30
UNLIMITED = 2**60  # bytes of host memory and disk of a machine that is not here
USABLE = 0.98  # of a GPU's memory; the driver uses the remainder
MOST_SETTINGS = 3
WORTH = 0.85  # a slower setting is worth showing if it needs at most this share of the memory of a faster one


@dataclass(frozen=True)
class Machine:
    """The machine of a plan. `gpu` is its name in the table; None: this machine."""

    capacity: Capacity
    ranks: int
    gpu: str | None = None

    @property
    def name(self) -> str:
        counted = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        size = f"{self.capacity.device / GIB:.0f} GiB each"
        if self.gpu is not None:
            return f"{self.ranks} x {self.gpu}, {size}"
        return f"this machine, {counted} on {distributed.world().device.type}, {size}"

    def rates(self, task: StageTask) -> Rates:
        """Return the speed for the models of a stage; every rank calls."""
        if self.gpu is None:
            return measure(task)
        return tabulated_rates(GPUS[self.gpu], task.policy.shape, dtype=task.work.config.dtype, ranks=self.ranks)

    def speed(self, dtype: str) -> str:
        """Return the origin of the speed."""
        if self.gpu is None:
            return f"measured now on this machine (torch threads a rank: {torch.get_num_threads()}), {dtype}"
        gpu = GPUS[self.gpu]
        figures = f"40 % of {gpu.tflops:,.0f} TFLOPS, 60 % of {gpu.bandwidth:,.0f} GB/s, {gpu.link:,.0f} GB/s links"
        return f"tabulated, not measured: data sheet of {self.gpu}, {figures}, {dtype}"


Setting = Mapping[str, Prediction]  # one candidate for each stage, all with the same layout


def run(config: RunConfig, folder: Path) -> None:
    """Print the plan. `folder` is temporary. Every rank calls."""
    machine = _machine(config)
    if machine.gpu is not None and config.engine.dtype == "auto":
        dtype = "bf16" if GPUS[machine.gpu].has_bf16 else "fp16"
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"dtype": dtype})})
    sizes = on_rank_zero(lambda: data_sizes(config, stages_to_run(config)))
    lines = describe(config, machine, sizes)
    if distributed.is_rank_zero():
        print("\n".join(lines), flush=True)


def _machine(config: RunConfig) -> Machine:
    plan = config.plan
    if plan.device is None:
        ranks = distributed.world().size
        return Machine(measure_capacity(config.engine, ranks), ranks)
    memory = round(GPUS[plan.device].memory * USABLE * GIB)
    return Machine(Capacity(memory, UNLIMITED, UNLIMITED, is_gpu=True), plan.ranks, plan.device)


def describe(config: RunConfig, machine: Machine, sizes: Mapping[str, DataSize]) -> list[str]:
    """Return the lines of the plan; every rank calls. Raises UserError for a model that cannot be counted."""
    tasks = _tasks(config, machine, sizes)
    rates: Rates = distributed.broadcast_object(machine.rates(next(iter(tasks.values()))))
    configured = {stage: predict(task, machine.capacity, rates) for stage, task in tasks.items()}
    settings = _settings(tasks, machine.capacity, rates)
    choices = worth_choosing([*([configured] if _fits(configured) else []), *settings])
    shown = configured if _fits(configured) or not choices else choices[0]
    dtype = next(iter(tasks.values())).work.config.dtype

    def fits(ranks: int) -> bool:
        others = _tasks(config, replace(machine, ranks=ranks), sizes)
        return bool(_settings(others, machine.capacity, rates))

    instead = "  the settings as configured do not fit; the table shows the first setting that is worth choosing"
    return [
        f"plan: {config.model.name} on {machine.name}",
        *([] if shown is configured else [instead]),
        *_stage_rows(tasks, shown),
        _disk(config, tasks, shown),
        *_advice(config, shown, machine, fits=fits),
        *_cost(config, shown, machine),
        *_choices(choices, list(tasks)),
        *_assumptions(tasks, sizes, machine.speed(dtype)),
    ]


def _tasks(config: RunConfig, machine: Machine, sizes: Mapping[str, DataSize]) -> dict[str, StageTask]:
    policy = architecture(config.model, config.seed)
    reward = architecture(config.reward_model, config.seed) if config.reward_model is not None else None
    tasks, is_cpu = {}, not machine.capacity.is_gpu
    for stage, size in sizes.items():
        inputs = PlanInputs(policy, reward, size)
        try:
            tasks[stage] = stage_task(config, stage, inputs, ranks=machine.ranks, is_cpu=is_cpu)
        except UserError:
            raise
        except ValueError as problem:
            raise UserError(f"{stage}: no plan: {problem}") from problem
    return tasks


def architecture(model: ModelConfig, seed: int) -> ModelSource:
    """Return a model's source without its weights. Only a model without `architecture` needs the hub or its cache."""
    if model.path is None and "model_type" in (model.architecture or {}):
        model = model.model_copy(update={"weights": "random"})
    return resolve(model, seed, weights=False)


def _settings(tasks: Mapping[str, StageTask], capacity: Capacity, rates: Rates) -> list[Setting]:
    """Return the layouts that fit in every stage, each with the fastest micro-batches that fit."""
    by_layout: dict[str, dict[str, Prediction]] = {}
    for stage, task in tasks.items():
        for layout, group in groupby(candidates(task, capacity, rates), key=lambda candidate: str(candidate.engine)):
            best = fastest(group)
            if best is not None:
                by_layout.setdefault(layout, {})[stage] = best
    return [setting for setting in by_layout.values() if setting.keys() == tasks.keys()]


def worth_choosing(settings: Sequence[Setting]) -> list[Setting]:
    """Return at most three settings that fit: the fastest, and slower ones that need clearly less memory.

    The last one needs the least memory.
    """
    found: list[Setting] = []
    for setting in sorted(settings, key=_seconds):
        if not found or _peak(setting) <= WORTH * _peak(found[-1]):
            found.append(setting)
    return found if len(found) <= MOST_SETTINGS else [found[0], found[len(found) // 2], found[-1]]


def _seconds(setting: Setting) -> float:
    return sum(candidate.stage_seconds for candidate in setting.values())


def _peak(setting: Setting) -> int:
    return max(candidate.demand.peak for candidate in setting.values())


def _fits(setting: Setting) -> bool:
    return all(candidate.fits for candidate in setting.values())


def _stage_rows(tasks: Mapping[str, StageTask], setting: Setting) -> Iterator[str]:
    yield f"  {'stage':8}{'steps':>8}{'tokens a step':>15}{'s a step':>10}{'time':>12}{'memory':>13}"
    for stage, candidate in setting.items():
        task = tasks[stage]
        yield (
            f"  {stage:8}{task.steps:8,}{round(task.sequences * task.length):15,}"
            f"{_three_digits(candidate.step_seconds):>10}{format_time(candidate.stage_seconds):>12}"
            f"{candidate.demand.peak / GIB:9.2f} GiB"
            f"   {candidate.demand.peak_phase}: {candidate.demand.largest_owners(2)}"
        )
        if stage == "ppo":
            parts = (f"{name} {_three_digits(value)}" for name, value in candidate.seconds.items())
            yield f"  {'':8}seconds: " + ", ".join(parts)
    yield f"  {'all':41}{format_time(_seconds(setting)):>12}{_peak(setting) / GIB:9.2f} GiB"
    offloaded = [max(getattr(c.demand, tier) for c in setting.values()) / GIB for tier in ("host", "nvme")]
    if any(offloaded):
        yield f"  offloaded for each rank: {offloaded[0]:.2f} GiB in host memory, {offloaded[1]:.2f} GiB in files"


def _disk(config: RunConfig, tasks: Mapping[str, StageTask], setting: Setting) -> str:
    seconds = {stage: candidate.stage_seconds for stage, candidate in setting.items()}
    return f"  disk: {run_bytes(config, tasks, seconds) / GIB:,.2f} GiB, for checkpoints and exported models"


def _advice(config: RunConfig, setting: Setting, machine: Machine, *, fits: Callable[[int], bool]) -> Iterator[str]:
    """Yield a line if the setting does not fit. `fits`: whether the run fits on a number of ranks."""
    if not _fits(setting):
        stage = max(setting, key=lambda stage: setting[stage].demand.peak)
        advice = more_memory(config, stage, ranks=machine.ranks, capacity=machine.capacity, fits=fits)
        yield f"  {stage} does not fit with any engine setting on {machine.name}: {advice}"


def _three_digits(value: float) -> str:
    """Format a number with at least three significant digits and without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cost(config: RunConfig, setting: Setting, machine: Machine) -> Iterator[str]:
    price, hours = config.plan.price_per_gpu_hour, _seconds(setting) / 3600
    if price is not None and _fits(setting):
        gpu_hours = machine.ranks * hours
        yield f"  cost: {price * gpu_hours:,.2f} ({gpu_hours:,.2f} GPU hours at {price:g})"


def _choices(choices: Sequence[Setting], stages: Sequence[str]) -> Iterator[str]:
    if not choices:
        return
    yield "  worth choosing between:" if len(choices) > 1 else "  setting:"
    for setting in choices:
        changes = dict.fromkeys(word for stage in stages for word in setting[stage].changes)
        words = " ".join(changes) or "as configured"
        yield f"    {format_time(_seconds(setting)):>12}{_peak(setting) / GIB:9.2f} GiB   {words}"


def _assumptions(tasks: Mapping[str, StageTask], sizes: Mapping[str, DataSize], speed: str) -> Iterator[str]:
    yield "  assumed:"
    yield f"    speed: {speed}"
    for stage, task in tasks.items():
        answers = f", answers of {task.response_length:.0f}" if stage == "ppo" else ""
        lengths = f"{task.length:.0f} tokens a sequence{answers}"
        if not task.tokens:
            lengths += " (the largest length)"
        yield f"    {stage}: {sizes[stage].rows:,} examples, {sizes[stage].origin}; {lengths}"
    yield "    not included: starting processes, loading, saving, downloads, other work on the machine"
