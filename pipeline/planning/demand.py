"""Predict bytes by owner and seconds by phase of each stage: SFT, reward model, DPO, PPO with its four models.

All models of a stage hold their states, and one of them works on one micro-batch. The peak of a phase adds both. On
disk, a run has the checkpoints of its stages and their exported models.
"""

import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.memory import (
    RETAINED,
    CostModel,
    ModelStates,
    Owners,
    Rates,
    checkpoint_bytes,
    generation_bytes,
    model_bytes,
    resting_bytes,
    scoring_bytes,
    training_bytes,
)
from pipeline.config.messages import format_bytes
from pipeline.config.schema import RunConfig
from pipeline.planning.stage_task import StageTask
from pipeline.stages.stage_run import LARGE, SECONDS_BETWEEN_SAVES

LONGER = 2.0  # by which a stage may take longer than predicted
TIERS = ("host", "nvme")  # owners of offloaded bytes: in host memory, and in files


@dataclass(frozen=True)
class Demand:
    """Predicted bytes of one rank at the peak of each phase, by owner.

    The owners in `TIERS` are offloaded, all others on the device. `shares_forward`: PPO keeps scoring forwards to train
    on.
    """

    phases: dict[str, Owners]
    shares_forward: bool = False

    def device_bytes(self, phase: str) -> int:
        """Return the bytes on the device at the peak of a phase."""
        return sum(size for owner, size in self.phases[phase].items() if owner not in TIERS)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.device_bytes)

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak of the stage."""
        return self.device_bytes(self.peak_phase)

    def largest_owners(self, count: int) -> str:
        """Return the largest owners on the device at the peak of the stage, with their bytes."""
        owners = [item for item in self.phases[self.peak_phase].items() if item[0] not in TIERS]
        largest = sorted(owners, key=lambda item: -item[1])[:count]
        return ", ".join(f"{owner} {format_bytes(size)}" for owner, size in largest)

    @property
    def host(self) -> int:
        """Offloaded bytes in host memory, at most."""
        return max(owners.get("host", 0) for owners in self.phases.values())

    @property
    def nvme(self) -> int:
        """Offloaded bytes in files, at most."""
        return max(owners.get("nvme", 0) for owners in self.phases.values())


def predict_bytes(task: StageTask, *, free_bytes: int | None = None, shares_forward: bool = False) -> Demand:
    """Predict a stage. `free_bytes` is the device's memory, which bounds the key-value cache.

    With `shares_forward` the forwards of all of a step's micro-batches wait for their backward, the critic's while the
    actor trains.
    """
    policy, work, load, is_ppo = task.policy.shape, task.policy.work, task.load, task.stage == "ppo"
    states = {name: model.states for name, model in task.models.items()}
    first = next(iter(states.values()))
    resting = resting_bytes(first)
    if is_ppo:
        resting = {name: states[name].resting for name, model in task.models.items() if model.kind != "shared"}
    phases, offloaded, busy = dict[str, Owners](), _offloaded(states.values()), resting
    if task.stage != "reward":
        parked = first.optimizer if load.park_optimizer and work.config.offload_optimizer == "none" else 0
        others = sum(resting.values()) - parked
        generation = generation_bytes(task.generated, work, load, resident=others, free_bytes=free_bytes)
        phases["generate"] = resting | generation | offloaded
        if parked:
            owner = next(iter(task.models)) if is_ppo else "optimizer"
            host = offloaded.get("host", 0) + parked
            phases["generate"] |= {owner: resting[owner] - parked, "host": host}
        if (is_ppo and load.keep) or (load.uses_vllm and work.is_cpu):  # on a CPU, vLLM cannot free its memory
            busy = resting | {owner: generation.get(owner, 0) for owner in RETAINED}
    widest = max(states.values(), key=lambda each: each.gathered)
    phases["score"] = busy | scoring_bytes(policy, work, widest) | offloaded
    for name, model in task.models.items():
        if model.kind == "trained":
            forwards = model.work.micro_batches if shares_forward and not model.work.has_other_loss else 1
            owners = training_bytes(model.shape, model.work, states[name], forwards=forwards)
            label = f"train {name}" if is_ppo else "train"
            phases[label] = busy | owners | _offloaded(states.values(), trains=states[name])
    if shares_forward and "critic" in task.models:
        if task.models["critic"].work.config.zero_stage < 3:  # stage 3 releases all units but the root unit, a norm
            phases["train actor"]["gathered"] += states["critic"].gathered
        phases["train actor"]["activations"] += phases["train critic"]["activations"]
    return Demand(phases, shares_forward)


def _offloaded(models: Collection[ModelStates], trains: ModelStates | None = None) -> Owners:
    """Return the offloaded bytes of all models; gradients exist for the model that trains."""
    host = sum(states.host - (0 if states is trains else states.host_gradients) for states in models)
    sizes = {"host": host, "nvme": sum(states.nvme for states in models)}
    return {tier: size for tier, size in sizes.items() if size}


def predict_seconds(task: StageTask, rates: Rates, *, shares_forward: bool = False) -> dict[str, float]:
    """Predict the seconds by phase of one step with sequences of mean length (PPO: one rollout and its updates)."""
    work = task.work
    tokens = math.ceil(math.ceil(task.sequences * work.config.sequence_parallel / work.ranks) * task.length)
    models = task.models.values()
    costs = [CostModel(model.shape, model.work, rates, tokens) for model in models]
    trained = [cost for cost, model in zip(costs, models, strict=True) if model.kind == "trained"]
    response_share, phases = 1.0, dict[str, float]()
    if task.stage == "ppo":
        response_share = task.response_length / task.length  # of tokens: those with a log-probability
        rounds = math.ceil(task.sequences / work.ranks / task.load.slots)
        phases["generate"] = costs[0].generation_seconds(
            steps=rounds * task.response_length,
            slots=task.load.slots,
            prompt_share=1 - response_share,
            context=task.length - task.response_length / 2,
        )
        phases["score"] = sum(
            cost.scoring_seconds(head_share=response_share)
            for cost, model in zip(costs, models, strict=True)
            if not (shares_forward and model.kind == "trained")
        )
    phases["train"] = task.passes * sum(m.training_seconds(task.updates, head_share=response_share) for m in trained)
    phases["step"] = task.passes * task.updates * sum(model.optimizer_seconds() for model in trained)
    return phases


def stage_seconds(task: StageTask, rates: Rates, seconds: Mapping[str, float]) -> float:
    """Predict the seconds of a stage, given those of a step by phase: all steps, and all evaluations."""
    work, load = task.policy.work, task.load
    policy = CostModel(task.generated, work, rates, math.ceil(task.scored * task.length / work.ranks))
    rounds = task.answered / work.ranks / load.slots
    answers = policy.generation_seconds(steps=rounds * load.response, slots=load.slots, prompt_share=0.0)
    return task.steps * sum(seconds.values()) + answers + policy.scoring_seconds(head_share=float(task.scored > 0))


def stage_checkpoint(task: StageTask) -> int:
    """Return the bytes of one checkpoint of a stage, over all ranks."""
    return sum(checkpoint_bytes(m.shape, m.work) for m in task.models.values() if m.kind == "trained")


def most_checkpoints(config: RunConfig, task: StageTask, seconds: float) -> int:
    """Return how many checkpoints a stage of some seconds has on disk at a time.

    These are the newest ones that it retains, the one that is written, and the best one.
    """
    section = getattr(config, task.stage)
    by_clock = not section.save_every and stage_checkpoint(task) > LARGE
    written = 1 + LONGER * seconds / SECONDS_BETWEEN_SAVES if by_clock else math.inf
    return int(min(section.keep_checkpoints + 1, written)) + section.selects_best


def run_bytes(config: RunConfig, tasks: Mapping[str, StageTask], seconds: Mapping[str, float]) -> int:
    """Return the use of the disk by the run folder when its last stage ends. `seconds`: those of each stage."""
    most = {stage: most_checkpoints(config, task, seconds[stage]) for stage, task in tasks.items()}
    return sum(
        most[stage] * stage_checkpoint(task) + model_bytes(task.generated, task.policy.work)
        for stage, task in tasks.items()
    )


def warn_of_disk(config: RunConfig, task: StageTask, folder: Path, seconds: float) -> list[str]:
    """Return a warning if the disk of a stage's folder has no room for its checkpoints; [] if it has.

    seconds: the predicted time of the stage. The complete checkpoints of an earlier start are on the disk already.
    """
    stage, size, most = task.stage, stage_checkpoint(task), most_checkpoints(config, task, seconds)
    present = len(list((folder / "checkpoints").glob("step-*[0-9]")))
    free = shutil.disk_usage(folder).free
    needed = max(0, most - present) * size + model_bytes(task.generated, task.policy.work)
    if needed <= free:
        return []
    fewer = f"set {stage}.keep_checkpoints=1, " if getattr(config, stage).keep_checkpoints > 1 else ""
    return [
        f"disk: a checkpoint of this stage has about {format_bytes(size)}, and up to {most} of them are on disk at a "
        f"time. With the exported model they need {format_bytes(needed)} more, but {folder} has {format_bytes(free)} "
        f"free: {fewer}free some space, or move the run folder to another disk and set run_dir= to it"
    ]
