"""Before a stage starts: predict whether it fits in memory, and choose the setting with `engine=auto`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine import distributed
from engine.memory import Rates, measure_rates
from pipeline.config.messages import format_bytes
from pipeline.config.schema import EngineSettings, RunConfig
from pipeline.config.stages import stages_to_run
from pipeline.errors import UserError, kind_and_line
from pipeline.files import PLAN, read_plan, write_json
from pipeline.models.build import natural_precision
from pipeline.models.source import natural_attention
from pipeline.planning.candidates import Capacity, Prediction, candidates, fastest, measure_capacity, predict
from pipeline.planning.data_size import later_size
from pipeline.planning.demand import warn_of_disk
from pipeline.planning.stage_task import DECODE_BATCH, PlanInputs, StageTask, stage_task
from pipeline.stages.restart import within_limits

RANK_COUNTS = (2, 4, 8, 16, 32, 64)  # tried where no engine setting fits


def plan(
    config: RunConfig,
    stage: str,
    inputs: PlanInputs,
    *,
    ranks: int,
    capacity: Capacity | None = None,
    rates: Rates | None = None,
) -> Prediction:
    """Predict a stage on `ranks` ranks and `capacity` (default: this machine's)."""
    capacity = capacity or measure_capacity(config.engine, ranks)
    return predict(stage_task(config, stage, inputs, ranks=ranks, is_cpu=not capacity.is_gpu), capacity, rates)


def fit_settings(
    config: RunConfig, stage: str, folder: Path, inputs: PlanInputs
) -> tuple[RunConfig, dict[str, dict[str, int]]]:
    """Print the prediction of a stage, and return settings with which it fits into memory. Every rank calls.

    On a GPU, raises UserError if the stage does not fit, unless engine.memory_check is "warn".

    Return the configuration to run with, and the predicted bytes by phase and owner (empty for a model that cannot be
    predicted, which trains without a prediction). `engine=auto` chooses the fastest setting that fits; a stage that
    resumes uses the setting that it started with. Limits that an earlier start found by running out of memory apply
    (`pipeline.stages.restart`). With the `size` of the data, the predicted seconds are written to plan.json.
    """
    record, world = _earlier_record(folder), distributed.world()
    # All ranks plan for the smallest device, so that they make the same choices.
    capacity = min(distributed.gather_objects(measure_capacity(config.engine, world.size)), key=astuple)
    planning = {"ranks": world.size, "capacity": capacity}
    try:
        if config.engine.auto:
            config, record = _choose_setting(config, stage, record, inputs, planning)
        config = within_limits(config, stage, folder)
        planned = plan(config, stage, inputs, **planning)
    except UserError:
        raise
    except Exception as problem:
        reason = f"no prediction for {inputs.policy.name} ({kind_and_line(problem)})"
        if config.engine.auto:
            raise UserError(f"engine=auto: {reason}; choose a setting, such as engine=zero2") from problem
        _print([f"memory: {reason}"])
        return config, {}
    more = partial(suggest_changes, config, stage, inputs, **planning)
    refuses = world.device.type == "cuda" and config.engine.memory_check == "refuse"
    _print(check_fit(planned, refuse=refuses, remedy=more))
    config = _with_predicted_sizes(config, planned)
    if inputs.size is not None and "stage_seconds" not in record:
        record |= _expected_seconds(config, planned, inputs)
    if distributed.is_rank_zero():
        _print(warn_of_disk(config, planned.task, folder, record.get("stage_seconds", math.inf)))
    if record and distributed.is_rank_zero():
        auto = {"engine.dtype": natural_precision(), "model.attention": natural_attention(inputs.policy.config)}
        write_json(folder / PLAN, record | {"ranks": world.size, "bytes": planned.demand.phases, "auto": auto})
    distributed.barrier()
    phases = planned.demand.phases.items()
    return config, {phase: {owner: size for owner, size in sizes.items() if size >= 0} for phase, sizes in phases}


def _with_predicted_sizes(config: RunConfig, planned: Prediction) -> RunConfig:
    """Return the configuration with the sizes that the prediction decides, if the user left them to it."""
    load, changes, ppo = planned.task.load, dict[str, Any](), config.ppo
    if planned.task.stage == "ppo":
        ppo = ppo.model_copy(update={"shared_forward": planned.demand.shares_forward})
        changes["batch_size"] = config.rollout.batch_size or max(load.slots, DECODE_BATCH)
    if load.uses_vllm:
        changes["cache_bytes"] = planned.demand.phases.get("generate", {}).get("cache")
    return config.model_copy(update={"ppo": ppo, "rollout": config.rollout.model_copy(update=changes)})


def _expected_seconds(config: RunConfig, planned: Prediction, inputs: PlanInputs) -> dict[str, Any]:
    """Return the predicted seconds of a step by phase, of the stage, and of the later stages of the run."""
    task, capacity = planned.task, planned.capacity
    rates = measure(task)
    expected = predict(task, capacity, rates)
    assert inputs.size is not None
    stages, own = _later_stages(config, task.stage), inputs.size
    sizes = {later: inputs.later.get(later) or later_size(config, task.stage, own, later) for later in stages}
    sizes = {
        later: replace(size, answer=size.answer or own.answer, held_out=own.held_out) for later, size in sizes.items()
    }
    # Reward model and policy have about the same shape, so the rates of this stage serve the later ones.
    planning = partial(plan, config, ranks=distributed.world().size, capacity=capacity, rates=rates)
    later_seconds: float | None
    try:
        later_seconds = sum(planning(later, replace(inputs, size=size)).stage_seconds for later, size in sizes.items())
    except ValueError:  # a model that cannot be counted, for example as a reward model
        later_seconds = None
    return {
        "seconds": expected.seconds,
        "stage_seconds": expected.stage_seconds,
        "later_seconds": later_seconds,
        "answer_tokens": own.answer,
        "later_sizes": {later: asdict(size) for later, size in inputs.later.items()},
    }


def _later_stages(config: RunConfig, stage: str) -> list[str]:
    stages = stages_to_run(config)
    return stages[stages.index(stage) + 1 :] if stage in stages else []


def check_fit(planned: Prediction, *, refuse: bool, remedy: Callable[[], str]) -> list[str]:
    """Return the lines to print before a stage. Raises UserError if it exceeds the memory and `refuse` is True.

    `remedy` returns the advice where no engine setting fits.
    """
    if planned.fits:
        return [planned.summary]
    candidate = planned.advice
    if candidate is None:
        advice = f"No engine setting fits; {remedy()}"
    else:
        advice = f"This setting fits: {' '.join(candidate.changes) or 'as configured'}"
    is_close = planned.demand.peak <= planned.capacity.device
    if refuse and not is_close:
        anyway = "To start it nevertheless: engine.memory_check=warn"
        raise UserError(f"{planned.summary}: the stage does not fit. {advice}. {anyway}")
    return [planned.summary, f"memory: the prediction {'almost fills' if is_close else 'exceeds'} the device. {advice}"]


def suggest_changes(config: RunConfig, stage: str, inputs: PlanInputs, *, ranks: int, capacity: Capacity) -> str:
    """Return what a user can change where no engine setting of a stage fits; arguments as in `plan`."""

    def fits(count: int) -> bool:
        task = stage_task(config, stage, inputs, ranks=count, is_cpu=not capacity.is_gpu)
        return any(candidate.fits for candidate in candidates(task, capacity))

    return more_memory(config, stage, ranks=ranks, capacity=capacity, fits=fits)


def more_memory(config: RunConfig, stage: str, *, ranks: int, capacity: Capacity, fits: Callable[[int], bool]) -> str:
    """Return advice with the smallest of RANK_COUNTS above `ranks` that `fits` accepts, or with those it refused.

    Each rank has `capacity`. Numbers that do not divide the batches or the groups of ranks are not tried. Ranks on CPUs
    divide the memory of their machine.
    """
    others = _or(_remedies(config, stage, is_gpu=capacity.is_gpu))
    if not capacity.is_gpu:
        return f"use a machine with more memory, {others}"
    key = "ranks" if config.plan.device is None else "plan.ranks"
    counts = [count for count in RANK_COUNTS if count > ranks and _are_divisible(config, count)]
    if not counts:
        return f"use more ranks ({key}=N), {others}"
    found = next(filter(fits, counts), None)
    each = f"ranks with {format_bytes(capacity.device)} each"
    if found is not None:
        return f"use {found} {each} ({key}={found}), {others}"
    return f"use {others}; {_or(list(map(str, counts)))} {each} do not fit either"


def _remedies(config: RunConfig, stage: str, *, is_gpu: bool) -> list[str]:
    """Return what needs less memory on the same ranks, without what the run uses already or would refuse."""
    found = ["a smaller model (model=NAME)"]
    rollout, excludes_stream = config.rollout, config.model.quantize != "none" or stage == "reward"
    if is_gpu and rollout.generator == "engine" and rollout.tensor_parallel == 1 and not excludes_stream:
        found[:0] = [] if rollout.stream else ["streamed generation (rollout.stream=true)"]
    return [f"adapters ({stage}.lora.rank=16)", *found] if not getattr(config, stage).lora.rank else found


def _or(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _are_divisible(config: RunConfig, ranks: int) -> bool:
    """Return whether the batches and the groups of ranks divide over the ranks."""
    from pipeline.config.check_machine import check_ranks  # for advice only

    try:
        check_ranks(config, ranks)
    except UserError:
        return False
    return True


def measure(task: StageTask) -> Rates:
    """Measure the speed of this machine for a stage's model; every rank calls."""
    rows = min(task.load.slots, 32)
    return measure_rates(task.policy.shape, dtype=task.work.config.dtype, length=task.work.max_length, rows=rows)


def _choose_setting(
    config: RunConfig, stage: str, record: dict[str, Any], inputs: PlanInputs, planning: Mapping[str, Any]
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration with the setting of an earlier start, or with the fastest one; and its record."""
    if "engine" in record:
        _print([f"engine=auto: the setting that this stage started with: {record['words']}"])
        return _configured(config, stage, record), record
    planned = plan(config, stage, inputs, **planning)
    best = fastest(candidates(planned.task, planned.capacity, measure(planned.task)))
    if best is None:
        device_size = format_bytes(planned.capacity.device)
        advice = suggest_changes(config, stage, inputs, **planning)
        anyway = "To start one nevertheless: engine=zero3 engine.memory_check=warn"
        raise UserError(f"engine=auto: no setting fits in {device_size} per device; {advice}. {anyway}")
    peak, words = format_bytes(best.demand.peak), " ".join(best.changes) or "as configured"
    _print([f"engine=auto: {words} ({peak}, about {best.step_seconds:.1f} s a step)"])
    record = {"words": words, "engine": best.engine, "micro_batch_tokens": best.task.work.micro_batch_tokens}
    return _configured(config, stage, record), record


def _configured(config: RunConfig, stage: str, record: Mapping[str, Any]) -> RunConfig:
    engine = EngineSettings.model_validate({**config.engine.model_dump(), **record["engine"], "auto": False})
    section = getattr(config, stage).model_copy(update={"micro_batch_tokens": record["micro_batch_tokens"]})
    return config.model_copy(update={"engine": engine, stage: section})


def _earlier_record(folder: Path) -> dict[str, Any]:
    """Return the record of an earlier start with as many ranks, on every rank; empty without one."""
    record: dict[str, Any] = distributed.broadcast_object(read_plan(folder) if distributed.is_rank_zero() else {})
    return record if record.get("ranks") == distributed.world().size else {}


def _print(lines: Sequence[str]) -> None:
    for line in lines if distributed.is_rank_zero() else ():
        print(line, flush=True)
