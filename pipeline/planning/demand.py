"""Predict bytes by owner and seconds by phase of each stage: SFT, reward model, DPO, PPO with its four models.

All models of a stage hold their states, and one of them works on one micro-batch. The peak of a phase adds both.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from engine.memory import (
    RETAINED,
    CostModel,
    GenerationLoad,
    ModelStates,
    Owners,
    Rates,
    generation_bytes,
    pipeline_training_bytes,
    resting_bytes,
    scoring_bytes,
    scoring_states,
    trained_states,
    training_bytes,
)
from pipeline.config.messages import format_bytes
from pipeline.planning.stage_task import StageTask

TIERS = ("host", "nvme")  # owners of offloaded bytes: in host memory, and in files


@dataclass(frozen=True)
class Demand:
    """Predicted bytes of one rank at the peak of each phase, by owner.

    The owners in `TIERS` are offloaded, all others on the device. The owner "overlap" is negative: bytes of the others
    that do not exist at the same time. `shares_forward`: PPO keeps scoring forwards to train on.
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
    """Predict a stage. `free_bytes` is the device's memory, which bounds the key-value cache."""
    load = replace(task.load, free_bytes=free_bytes)
    if task.stage == "ppo":
        return Demand(_ppo_phases(task, load, shares_forward), shares_forward)
    return Demand(_supervised_phases(task, load))


def _supervised_phases(task: StageTask, load: GenerationLoad) -> dict[str, Owners]:
    """SFT and DPO train, score and answer held-out prompts; the reward model trains and scores.

    With pipeline parallelism each stage trains its blocks, and the full model answers held-out prompts.
    """
    states = trained_states(task.policy, task.work)
    resting = resting_bytes(states)
    has_logits = task.stage != "reward"
    if task.work.config.pipeline_parallel > 1:
        stages = pipeline_training_bytes(task.policy, task.work)
        phases = {f"train, stage {number}" if number > 1 else "train": each for number, each in enumerate(stages, 1)}
        resting = {owner: max(each[owner] for each in stages) for owner in resting}
    else:
        train = training_bytes(task.policy, task.work, states, has_logits=has_logits)
        phases = {
            "train": resting | train | _offloaded([states], trains=states),
            "score": resting | scoring_bytes(task.policy, task.work, states) | _offloaded([states]),
        }
    if has_logits:
        generation = _generation_bytes(task, load, sum(resting.values()))
        phases["generate"] = resting | generation | _offloaded([states])
    return phases


def _generation_bytes(task: StageTask, load: GenerationLoad, resident: int) -> Owners:
    shape, work = task.generates or task.policy, task.roles.get("actor", task.work)
    is_split = max(shape.tensor, task.policy.tensor, work.config.pipeline_parallel) > 1
    return generation_bytes(shape, work, load, is_split=is_split, resident=resident)


def _ppo_phases(task: StageTask, load: GenerationLoad, shares_forward: bool) -> dict[str, Owners]:
    """Actor and critic have optimizer states; reference and reward model are in compute precision.

    Under adapters the reference is the actor. With `shares_forward` the forwards of all of a step's micro-batches wait
    for their backward, the critic's while the actor trains.
    """
    policy, scorer = task.policy, task.scorer or task.policy
    work = {role: task.roles.get(role, task.work) for role in ("actor", "critic", "reference", "reward")}
    work["critic"] = replace(work["critic"], **task.scorer_layout, has_average=False, has_other_loss=False)
    work["reward"] = replace(work["reward"], **task.scorer_layout)
    actor = trained_states(policy, work["actor"])
    models = {"actor": actor}
    if task.has_critic:
        models["critic"] = trained_states(scorer, work["critic"])
    if task.has_reference and not task.work.adapters:
        models["reference"] = scoring_states(policy, work["reference"])
    for number in range(1, task.reward_models + 1):
        models["reward" if number == 1 else f"reward_{number}"] = scoring_states(scorer, work["reward"])
    resting = {role: states.resting for role, states in models.items()}
    parked = actor.optimizer if load.park_optimizer and work["actor"].config.offload_optimizer == "none" else 0
    generation = _generation_bytes(task, load, sum(resting.values()) - parked)
    busy = resting | ({owner: generation[owner] for owner in RETAINED} if load.keep else {})
    scoring = max(models.values(), key=lambda states: states.gathered)
    waiting = {role: work[role].micro_batches if shares_forward else 1 for role in ("actor", "critic")}
    if task.work.has_other_loss:
        waiting["actor"] = 1
    offloaded = _offloaded(models.values())
    phases = {
        "generate": resting | {"actor": actor.resting - parked} | generation | offloaded,
        "score": busy | scoring_bytes(policy, task.work, scoring) | offloaded,
        "train actor": busy
        | training_bytes(policy, work["actor"], actor, forwards=waiting["actor"])
        | _offloaded(models.values(), trains=actor),
    }
    if parked:
        phases["generate"]["host"] = offloaded.get("host", 0) + parked
    if task.has_critic:
        critic = models["critic"]
        owners = training_bytes(scorer, work["critic"], critic, has_logits=False, forwards=waiting["critic"])
        phases["train critic"] = busy | owners | _offloaded(models.values(), trains=critic)
        if shares_forward:
            config = work["critic"].config
            gathered = critic.gathered
            if config.zero_stage == 3:  # only the root unit stays gathered between forward and backward
                gathered = min(gathered, scorer.held_root * (4 if config.dtype == "fp32" else 2))
            phases["train actor"]["gathered"] += gathered
            phases["train actor"]["activations"] += owners["activations"]
    return phases


def _offloaded(models: Collection[ModelStates], trains: ModelStates | None = None) -> Owners:
    """Return the offloaded bytes of all models; gradients exist for the model that trains."""
    host = sum(states.host - (0 if states is trains else states.host_gradients) for states in models)
    sizes = {"host": host, "nvme": sum(states.nvme for states in models)}
    return {tier: size for tier, size in sizes.items() if size}


def predict_seconds(task: StageTask, rates: Rates, *, is_gpu: bool, shares_forward: bool = False) -> dict[str, float]:
    """Predict the seconds by phase of one step with sequences of mean length (PPO: one rollout and its updates)."""
    work, scorer = task.work, task.scorer or task.policy
    tokens = math.ceil(math.ceil(task.sequences * work.config.sequence_parallel / work.ranks) * task.length)
    policy = CostModel(task.policy, work, rates, is_gpu, tokens)
    trained, response_share, phases = [policy], 1.0, dict[str, float]()
    if task.stage == "ppo":
        response_share = task.response_length / task.length  # of tokens: those with a log-probability
        judge = CostModel(scorer, replace(work, **task.scorer_layout), rates, is_gpu, tokens)
        rounds = math.ceil(task.sequences / work.ranks / task.load.slots)
        phases["generate"] = policy.generation_seconds(
            steps=rounds * task.response_length,
            slots=task.load.slots,
            prompt_share=1 - response_share,
            context=task.length - task.response_length / 2,
        )
        policies = 1 + task.has_reference - shares_forward
        judges = task.has_critic + task.reward_models - (shares_forward and task.has_critic)
        phases["score"] = policies * policy.scoring_seconds(head_share=response_share)
        phases["score"] += judges * judge.scoring_seconds()
        trained += [judge] if task.has_critic else []
    phases["train"] = task.passes * sum(m.training_seconds(task.updates, head_share=response_share) for m in trained)
    phases["step"] = task.passes * task.updates * sum(model.optimizer_seconds() for model in trained)
    return phases


def stage_seconds(task: StageTask, rates: Rates, seconds: Mapping[str, float], *, is_gpu: bool) -> float:
    """Predict the seconds of a stage, given those of a step by phase: all steps, and all evaluations."""
    work, load = task.work, task.load
    policy = CostModel(task.policy, work, rates, is_gpu, math.ceil(task.scored * task.length / work.ranks))
    rounds = task.answered / work.ranks / load.slots
    answers = policy.generation_seconds(steps=rounds * load.response, slots=load.slots, prompt_share=0.0)
    return task.steps * sum(seconds.values()) + answers + policy.scoring_seconds(head_share=float(task.scored > 0))
