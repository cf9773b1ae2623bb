"""Predict bytes by owner and seconds by phase of each stage: SFT, reward model, DPO, PPO with its four models.

All models of a stage rest, and one of them works on one micro-batch. The peak of a phase adds both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.memory import (
    RETAINED,
    CostModel,
    GenerationLoad,
    ModelStates,
    Owners,
    Probe,
    gathered_bytes,
    generation_bytes,
    pipeline_training_bytes,
    resting_bytes,
    scoring_logits,
    scoring_states,
    trained_states,
    training_bytes,
)
from pipeline.planning.stage_task import StageTask


@dataclass(frozen=True)
class Demand:
    """Predicted bytes of one rank, by phase and owner.

    `phases` are bytes on the device, `offloaded` those on the "host" and in files ("nvme"). `overlaps` are bytes of a
    phase's owners that do not exist at the same time. `shares_forward`: PPO keeps scoring forwards to train on.
    """

    phases: dict[str, Owners]
    offloaded: dict[str, Owners] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    shares_forward: bool = False

    def phase_bytes(self, phase: str) -> int:
        """Return the bytes on the device at the peak of a phase."""
        return sum(self.phases[phase].values()) - self.overlaps.get(phase, 0)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak of the stage."""
        return self.phase_bytes(self.peak_phase)

    @property
    def host(self) -> int:
        """Offloaded bytes in host memory, at most."""
        return max((owners.get("host", 0) for owners in self.offloaded.values()), default=0)

    @property
    def nvme(self) -> int:
        """Offloaded bytes in files, at most."""
        return max((owners.get("nvme", 0) for owners in self.offloaded.values()), default=0)

    @property
    def by_phase(self) -> dict[str, Owners]:
        """Bytes by phase and owner, offloaded ones included."""
        return {phase: owners | self.offloaded.get(phase, {}) for phase, owners in self.phases.items()}


def predict_bytes(task: StageTask, *, free_bytes: int | None = None, shares_forward: bool = False) -> Demand:
    """Predict a stage. `free_bytes` is the device's memory, which bounds the key-value cache."""
    load = replace(task.load, free_bytes=free_bytes)
    if task.work.config.pipeline_parallel > 1:
        return _pipeline_bytes(task, load)
    return _ppo_bytes(task, load, shares_forward) if task.stage == "ppo" else _supervised_bytes(task, load)


def _supervised_bytes(task: StageTask, load: GenerationLoad) -> Demand:
    """SFT and DPO train, score and answer held-out prompts; the reward model trains and scores."""
    is_lm = task.stage != "reward"
    states = trained_states(task.policy, task.work)
    resting = resting_bytes(states)
    phases = {
        "train": resting | training_bytes(task.policy, task.work, states, has_logits=is_lm),
        "score": resting | gathered_bytes(states),
    }
    if is_lm:
        phases["score"]["logits"] = scoring_logits(task.policy, task.work)
        phases["generate"] = resting | _generation(task, load, sum(resting.values()))
    offloaded = {phase: _offloaded([states], states if phase == "train" else None) for phase in phases}
    return Demand(phases, offloaded, {"train": states.overlap})


def _pipeline_bytes(task: StageTask, load: GenerationLoad) -> Demand:
    """Each pipeline stage trains its blocks; the full model answers held-out prompts."""
    stages = pipeline_training_bytes(task.policy, task.work)
    names = ["train", *(f"train, stage {number}" for number in range(2, len(stages) + 1))]
    phases = dict(zip(names, (owners for owners, _ in stages), strict=True))
    resting = max((resting_bytes(states) for _, states in stages), key=lambda owners: sum(owners.values()))
    phases["generate"] = resting | _generation(task, load, sum(resting.values()), is_gathered=True)
    overlaps = dict(zip(names, (states.overlap for _, states in stages), strict=True))
    return Demand(phases, overlaps=overlaps)


def _generation(task: StageTask, load: GenerationLoad, resident: int, *, is_gathered: bool = False) -> Owners:
    work = task.work
    if is_gathered:  # the full model is a copy, as it is of a sharded one
        work = replace(work, ranks=max(2, work.ranks), config=replace(work.config, zero_stage=1))
    return generation_bytes(task.generates or task.policy, work, load, trained=task.policy, resident=resident)


def _ppo_bytes(task: StageTask, load: GenerationLoad, shares_forward: bool) -> Demand:
    """Actor and critic rest with their optimizers, reference and reward model in compute precision.

    Under adapters the reference is the actor. With `shares_forward` the forwards of all of a step's micro-batches wait
    for their backward, the critic's while the actor trains.
    """
    actor_shape, scorer = task.policy, task.scorer or task.policy
    work = {role: task.roles.get(role, task.work) for role in ("actor", "critic", "reference", "reward")}
    work["critic"] = replace(work["critic"], adapters=0, has_average=False, has_other_loss=False)
    actor = trained_states(actor_shape, work["actor"])
    models = {"actor": actor}
    if task.has_critic:
        models["critic"] = trained_states(scorer, work["critic"])
    if task.has_reference and not task.work.adapters:
        models["reference"] = scoring_states(actor_shape, work["reference"])
    if task.has_reward:
        models["reward"] = scoring_states(scorer, work["reward"])
    resting = {role: states.resting for role, states in models.items()}
    parked = actor.moments if load.park_optimizer and work["actor"].config.offload_optimizer == "none" else 0
    generating = resting | {"actor": actor.resting - parked}
    generation = _generation(replace(task, work=work["actor"]), load, sum(generating.values()))
    busy = resting | ({owner: generation[owner] for owner in RETAINED} if load.keep else {})
    scoring = max(models.values(), key=lambda states: states.gathered)
    waiting = work["actor"].micro_batches if shares_forward and not task.work.has_other_loss else 1
    phases = {
        "generate": generating | generation,
        "score": busy | gathered_bytes(scoring) | {"logits": scoring_logits(actor_shape, task.work)},
        "train actor": busy | training_bytes(actor_shape, work["actor"], actor, forwards=waiting),
    }
    training = {"train actor": actor}
    if task.has_critic:
        critic, critic_work = models["critic"], work["critic"]
        waiting = critic_work.micro_batches if shares_forward else 1
        owners = training_bytes(scorer, critic_work, critic, has_logits=False, forwards=waiting)
        phases["train critic"] = busy | owners
        training["train critic"] = critic
        if shares_forward:  # between forward and backward stage 3 keeps the root alone gathered
            at_least = scorer.root * (2 if critic_work.config.dtype != "fp32" else 4)
            held = at_least if critic_work.config.zero_stage == 3 else critic.gathered
            phases["train actor"]["gathered"] += min(held, critic.gathered)
            phases["train actor"]["activations"] += owners["activations"]
    offloaded = {phase: _offloaded([*models.values()], training.get(phase)) for phase in phases}
    if parked:
        offloaded["generate"]["host"] = offloaded["generate"].get("host", 0) + parked
    overlaps = {phase: states.overlap for phase, states in training.items()}
    return Demand(phases, offloaded, overlaps, shares_forward)


def _offloaded(models: Sequence[ModelStates], trains: ModelStates | None) -> Owners:
    """Return the offloaded bytes of all models; gradients exist for the model that trains."""
    host = sum(states.host - (0 if states is trains else states.host_gradients) for states in models)
    found = {"host": host, "nvme": sum(states.nvme for states in models)}
    return {tier: size for tier, size in found.items() if size}


def predict_seconds(task: StageTask, probe: Probe, *, is_gpu: bool, shares_forward: bool = False) -> dict[str, float]:
    """Predict the seconds by phase of one step with sequences of full length (PPO: one rollout and its updates).

    The probe ran a block of the policy; critic and reward model scale with the size of their blocks.
    """
    work, scorer = task.work, task.scorer or task.policy
    length = work.max_length
    tokens = math.ceil(task.sequences * work.config.sequence_parallel / work.ranks) * length
    response_share = task.load.response / length if task.stage == "ppo" else 1.0  # of tokens: those with a log-prob
    policy = CostModel(task.policy, work, probe, is_gpu, tokens)
    judge_work = replace(work, adapters=0)
    judge = CostModel(scorer, judge_work, probe, is_gpu, tokens, scorer.block / (task.policy.block or 1))
    phases: dict[str, float] = {}
    if task.stage == "ppo":
        rounds = math.ceil(task.sequences / work.ranks / task.load.slots)
        steps = rounds * task.load.response
        phases["generate"] = policy.generation_seconds(
            steps=steps, slots=task.load.slots, prompt_share=1 - response_share
        )
        policies = 1 + task.has_reference - shares_forward
        scorers = task.has_critic + task.has_reward - (shares_forward and task.has_critic)
        phases["score"] = policies * policy.scoring_seconds(head_share=response_share)
        phases["score"] += scorers * judge.scoring_seconds()
    trained = [policy, judge] if task.stage == "ppo" and task.has_critic else [policy]
    phases["train"] = task.passes * sum(m.training_seconds(task.updates, head_share=response_share) for m in trained)
    phases["step"] = task.passes * task.updates * sum(model.optimizer_seconds() for model in trained)
    return phases
