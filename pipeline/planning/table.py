"""`stage=plan`: for each stage of a run's configuration, predicted bytes, seconds and settings, without training."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.config.stages import METHODS
from pipeline.distributed import is_rank_zero, rank_count
from pipeline.errors import UserError
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import base_source
from pipeline.planning.candidates import Candidate, Capacity, candidates, fastest
from pipeline.planning.demand import TIERS, predict_seconds
from pipeline.planning.planner import Plan, measure, more_memory, plan

GIB = 2**30


def run(config: RunConfig, folder: Path) -> None:
    """Print the plan of every stage. `folder` is temporary. Every rank calls."""
    policy = base_source(config)
    reward = resolve(config.reward_model, config.seed) if config.reward_model is not None else None
    for stage in planned_stages(config):
        lines = describe(config, stage, policy=reward or policy if stage == "reward" else policy, reward=reward)
        try:
            for line in lines:
                if is_rank_zero():
                    print(line, flush=True)
        except UserError:
            raise
        except ValueError as problem:  # a model that cannot be counted; other stages have other models
            if is_rank_zero():
                print(f"\n{stage}: no plan: {problem}", flush=True)


def planned_stages(config: RunConfig) -> list[str]:
    """Return the stages of a run that have a plan: with pipeline parallelism only SFT."""
    if config.engine.pipeline_parallel > 1:
        return ["sft"]
    return [stage for stage in METHODS[config.method] if stage != "reward" or config.ppo.reward_model]


def describe(
    config: RunConfig,
    stage: str,
    *,
    policy: ModelSource,
    reward: ModelSource | None = None,
    ranks: int | None = None,
    capacity: Capacity | None = None,
) -> Iterator[str]:
    """Yield the lines of one stage; every rank calls.

    With `ranks` and `capacity` the plan is for another machine, and has no seconds.
    """
    is_here, ranks = capacity is None, ranks or rank_count()
    reward = reward if stage == "ppo" else None
    planned = plan(config, stage, policy=policy, reward=reward, ranks=ranks, capacity=capacity)
    task, capacity = planned.task, planned.capacity
    counted = f"{ranks} rank{'s' if ranks > 1 else ''}, {task.work.config.dtype}"
    memory = f"{capacity.device / GIB:.1f} GiB {'a device' if capacity.is_gpu else 'of host memory a rank'}"
    yield ""
    yield f"{stage}: {policy.name}, {counted}; {memory}, {capacity.disk / GIB:.0f} GiB of disk a rank"
    yield from _owners(planned)
    if stage == "dpo" and task.has_reference:
        yield "  the policy computes the reference log-probabilities before its first step; there is no second model"
    probe = measure(config, task) if is_here else None
    if probe is not None:
        seconds = predict_seconds(task, probe, is_gpu=capacity.is_gpu)
        phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
        yield f"  seconds a step with full-length sequences: {sum(seconds.values()):.2f} ({phases})"
    settings = [*candidates(task, capacity, probe)]
    yield from _settings(settings)
    best = fastest(settings)
    if best is None:
        yield f"  no setting fits; use {more_memory(stage)}"
    else:
        yield f"  the {'fastest' if is_here else 'first'} that fits: {best.changes}"


def _owners(planned: Plan) -> Iterator[str]:
    """Yield one row for each owner, with one column for each phase."""
    phases = planned.demand.phases
    width = max(14, 2 + max(len(phase) for phase in phases))
    yield "  as configured, GiB" + "".join(f"{phase:>{width}}" for phase in phases)
    for owner in dict.fromkeys(owner for owners in phases.values() for owner in owners if owner not in TIERS):
        cells = "".join(f"{owners.get(owner, 0) / GIB:{width}.3f}" for owners in phases.values())
        yield f"    {owner:18}{cells}"
    yield f"    {'total':18}" + "".join(f"{planned.demand.device_bytes(phase) / GIB:{width}.3f}" for phase in phases)
    verdict = "it fits" if planned.fits else "it does not fit"
    yield f"    host {planned.demand.host / GIB:.3f}, files {planned.demand.nvme / GIB:.3f}; {verdict}"


def _settings(settings: Sequence[Candidate]) -> Iterator[str]:
    """Yield one row for each layout, with the largest micro-batch that fits, or the smallest."""
    yield "  from fastest to leanest:    GiB    host   files   seconds"
    layouts: dict[str, list[Candidate]] = {}
    for candidate in settings:
        layouts.setdefault(str(candidate.engine), []).append(candidate)
    for group in layouts.values():
        shown = next((candidate for candidate in group if candidate.fits), group[-1])
        demand = shown.demand
        yield (
            f"    {'fits' if shown.fits else 'no  '} {demand.peak / GIB:22.2f}{demand.host / GIB:8.2f}"
            f"{demand.nvme / GIB:8.2f}{shown.step_seconds:10.2f}   {shown.changes}"
        )
