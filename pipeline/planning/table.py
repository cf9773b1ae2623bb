"""`stage=plan`: for each stage of a run's own configuration, bytes, seconds and settings, without training."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.memory import Workload
from engine.planning import step_seconds
from pipeline.config.schema import RunConfig
from pipeline.config.stages import METHODS
from pipeline.distributed import is_rank_zero, rank_count
from pipeline.errors import UserError
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import base_source
from pipeline.planning.choose import Candidate, candidates, fastest, measure, pace_of
from pipeline.planning.fit import GIB, Plan, beyond_settings, plan


def run(config: RunConfig, folder: Path) -> None:
    """Print the plan of every stage; `folder` is thrown away afterwards."""
    policy = base_source(config)
    reward = resolve(config.reward_model, config.seed) if config.reward_model is not None else None
    stages = [stage for stage in METHODS[config.method] if stage != "reward" or config.ppo.reward_model]
    for stage in stages if config.engine.pipeline_parallel == 1 else ["sft"]:
        lines = describe(config, stage, policy=reward or policy if stage == "reward" else policy, reward=reward)
        try:
            for line in lines:
                if is_rank_zero():
                    print(line, flush=True)
        except UserError:
            raise
        except ValueError as problem:  # a model that can't be counted; of the other stages there is something to tell
            if is_rank_zero():
                print(f"\n{stage}: no plan: {problem}", flush=True)


def describe(config: RunConfig, stage: str, *, policy: ModelSource, reward: ModelSource | None = None) -> Iterator[str]:
    """The lines of one stage; every rank calls."""
    ranks = rank_count()
    found = plan(config, stage, policy=policy, reward=reward if stage == "ppo" else None, ranks=ranks)
    measured, pace = measure(config, found.task), pace_of(config, stage, found.task)
    task, on_gpu = found.task, found.room.on_gpu
    seconds = step_seconds(task.policy, task.work, pace, measured, on_gpu=on_gpu, critic=task.critic)
    yield ""
    yield f"{stage}: {policy.name}, {ranks} rank{'s' if ranks > 1 else ''}, {found.task.work.dtype}; {_room(found)}"
    yield from _bytes(found)
    if stage == "dpo":
        yield "  the reference: two numbers a pair, read by the policy before its first step; no second model is held"
    took = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    yield f"  seconds a step at full length: {sum(seconds.values()):.2f} ({took})"
    found_all = candidates(found.task, found.room, pace, measured)
    best = fastest(found_all)
    yield from _settings(found_all, best, stage, found.task.work)


def _room(found: Plan) -> str:
    what = "a device" if found.room.on_gpu else "of the host's memory a rank"
    return f"{found.room.device / GIB:.1f} GiB {what}, {found.room.disk / GIB:.0f} GiB of disk a rank"


def _bytes(found: Plan) -> Iterator[str]:
    """Owners down, phases across."""
    phases = found.demand.phases
    owners = list(dict.fromkeys(owner for part in phases.values() for owner in part))
    wide = max(14, 2 + max(len(name) for name in phases))
    yield "  as configured, GiB" + "".join(f"{name:>{wide}}" for name in phases)
    for owner in owners:
        yield f"    {owner:16}" + "".join(f"{part.get(owner, 0) / GIB:{wide}.3f}" for part in phases.values())
    yield f"    {'together':16}" + "".join(f"{found.demand.height(phase) / GIB:{wide}.3f}" for phase in phases)
    yield f"    host {found.demand.host / GIB:.3f}, files {found.demand.nvme / GIB:.3f}; {_verdict(found)}"


def _verdict(found: Plan) -> str:
    return "it fits" if found.fits else "it does not fit"


def _settings(found: Sequence[Candidate], best: Candidate | None, stage: str, work: Workload) -> Iterator[str]:
    """One line a layout: with the largest micro-batch that fits, or the smallest."""
    yield "  from fastest to leanest:    GiB    host   files   seconds"
    layouts: dict[str, list[Candidate]] = {}
    for candidate in found:
        layouts.setdefault(str(candidate.setting.engine), []).append(candidate)
    for group in layouts.values():
        shown = next((candidate for candidate in group if candidate.fits), group[-1])
        demand = shown.demand
        yield (
            f"    {'fits' if shown.fits else 'no  '} {demand.peak / GIB:22.2f}{demand.host / GIB:8.2f}"
            f"{demand.nvme / GIB:8.2f}{shown.total:10.2f}   {_short(shown)}"
        )
    if best is None:
        yield f"  no setting fits: {beyond_settings(stage)}"
    else:
        yield f"  the fastest that fits: {best.setting.words(stage, work)}"


def _short(candidate: Candidate) -> str:
    engine = candidate.setting.engine
    parts = [f"zero{engine['zero_stage']}"]
    parts += [f"optimizer on {engine['offload_optimizer']}"] if engine["offload_optimizer"] != "none" else []
    parts += [f"parameters on {engine['offload_parameters']}"] if engine["offload_parameters"] != "none" else []
    parts += ["recomputing"] if engine["activation_checkpointing"] else []
    return ", ".join(parts) + f", micro-batches of {candidate.setting.tokens}"
