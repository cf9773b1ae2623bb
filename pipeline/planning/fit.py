"""Whether a stage fits, told before it starts: predicted bytes, and what to change where they exceed what is there.

A prediction is a sum of what is known (engine/memory). The rollout engine cuts its cache to what is free, so that only
a few sequences of it have to fit.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from engine.config import EngineConfig, OptimizerConfig, Precision
from engine.generation.packed import copies
from engine.kernels_cpu.library import library
from engine.memory import Demand, Shape, Workload, ppo_demand, reward_demand, sft_demand
from engine.memory.machine import this_machine
from engine.memory.shapes import measured
from engine.optim import averages_itself, kinds
from engine.parallel import dist
from pipeline.config.engines import engine_settings
from pipeline.config.schema import ROLE_ENGINES, EngineSettings, LoraConfig, RunConfig, StageSection
from pipeline.errors import UserError
from pipeline.models.build import EngineChoice
from pipeline.models.source import ModelSource
from pipeline.planning.ladder import Room, Setting, ladder
from pipeline.report.axes import format_bytes

GIB = 2**30


@dataclass(frozen=True)
class Task:
    """A stage as the planner sees it: what is run, on which models, by how many ranks.

    `roles` are PPO's models that have an engine of their own, and what they run; there may be no critic, no reference
    and no reward model. `shared` says whether PPO keeps its forwards from scoring to learning; None: where that fits.
    """

    stage: str
    work: Workload
    policy: Shape
    critic: Shape
    roles: Mapping[str, Workload]
    has_critic: bool = True
    has_reference: bool = True
    has_reward: bool = True
    generates: Shape | None = None  # the policy, split as it generates
    shared: bool | None = False

    def demand(self, room: Room, setting: Setting | None = None) -> Demand:
        """Bytes in some room as configured, or under another setting of what all models share."""
        work = replace(self.work if setting is None else setting.of(self.work), room=room.device)
        if self.stage == "ppo":
            own_reference = self.has_reference and not work.adapters  # under adapters it is the actor
            roles = {role: replace(own, room=room.device) for role, own in self.roles.items()}
            told = partial(
                ppo_demand,
                self.policy,
                self.critic,
                work,
                own_reference=own_reference,
                has_critic=self.has_critic,
                has_reward=self.has_reward,
                roles=roles,
                generates=self.generates,
            )
            demand = told(shared=self.shared is not False)
            return demand if self.shared is not None or room.holds(demand) else told(shared=False)
        if self.stage in ("sft", "dpo"):  # DPO's reference is the policy before it learns, no model beside it
            return sft_demand(self.policy, work, generates=self.generates)
        return reward_demand(self.policy, work)


@dataclass(frozen=True)
class Plan:
    """The prediction of one stage, what there is, and the first setting that would fit (None: this one, or none)."""

    task: Task
    demand: Demand
    room: Room
    fits: bool
    advice: Setting | None

    @property
    def line(self) -> str:
        """memory: about X of Y a device."""
        need = self.demand.peak + (0 if self.room.on_gpu else self.demand.host)
        return f"memory: about {format_bytes(need)} of {format_bytes(self.room.device)} a device ({self._owners})"

    @property
    def _owners(self) -> str:
        parts = sorted(self.demand.phases[self.demand.worst].items(), key=lambda part: -part[1])
        return f"{self.demand.worst}: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:4])


def plan(
    config: RunConfig,
    stage: str,
    *,
    policy: ModelSource,
    reward: ModelSource | None = None,
    ranks: int,
    room: Room | None = None,
) -> Plan:
    """Predict a stage ("sft", "reward", "dpo" or "ppo") on `ranks` ranks.

    `policy` is the model that is trained (the reward stage: that one), `reward` the base of reward model and critic
    (None: that model, too).
    `room` is what a rank may have, measured by default.
    """
    found = task(config, stage, policy=policy, reward=reward, ranks=ranks)
    there = room if room is not None else this_room(config.engine, ranks)
    demand = found.demand(there)
    fits = there.holds(demand)
    advice = None if fits else next((s for s in ladder(found.work, there) if there.holds(found.demand(there, s))), None)
    return Plan(found, demand, there, fits, advice)


def task(config: RunConfig, stage: str, *, policy: ModelSource, reward: ModelSource | None = None, ranks: int) -> Task:
    """The stage's settings and models in the engine's words."""
    parts = config.engine.tensor_parallel
    shape, together = _shape(policy, parts, scores=stage == "reward"), config.rollout.tensor_parallel
    generates = shape if together == parts else _shape(policy, together)
    has_critic, has_reward = config.ppo.advantage == "gae", config.ppo.reward_model
    scores = stage == "ppo" and (has_critic or has_reward)
    critic = _shape(reward or policy, parts, scores=True) if scores else shape
    roles = {}
    for key in ROLE_ENGINES if stage == "ppo" else ():
        own = getattr(config.ppo, key)
        if own:
            roles[key.removesuffix("_engine")] = workload(
                config, stage, ranks, engine_settings(config.engine, own), policy.config, shape
            )
    work = workload(config, stage, ranks, config.engine, policy.config, shape)
    return Task(
        stage,
        work,
        shape,
        critic,
        roles,
        has_critic=has_critic,
        has_reference=config.ppo.asks_reference,
        has_reward=has_reward,
        generates=generates,
        shared=config.ppo.shared_forward if stage == "ppo" and may_share(config) else False,
    )


def may_share(config: RunConfig) -> bool:
    """Whether PPO's first update sees the sequences, in the micro-batches, that were scored before."""
    return config.ppo.minibatches == 1 and config.engine.pipeline_parallel == 1


def _shape(source: ModelSource, parts: int, *, scores: bool = False) -> Shape:
    return measured(source.name, source.config, source.attention, parts, source.tensor_plan, scores=scores)


def workload(
    config: RunConfig, stage: str, ranks: int, settings: EngineSettings, architecture: PretrainedConfig, shape: Shape
) -> Workload:
    """The stage's settings in the engine's words; `architecture` and `shape` are the policy's."""
    section: StageSection = getattr(config, stage)
    # A tensor group, or a pipeline, sees the same data, and shards each part by itself; a sequence group does not.
    ranks //= settings.tensor_parallel * settings.pipeline_parallel
    shares, sequence = ranks // settings.sequence_parallel, settings.sequence_parallel
    # the stage's own number of steps, for schedules that ask: it changes no byte
    layout = EngineChoice(settings, OptimizerConfig(lr=section.lr, total_steps=section.steps or 1)).layout()
    engine: EngineConfig = layout["config"]
    optimizer: OptimizerConfig = layout["optimizer"]
    length = section.max_length
    if stage == "ppo":
        length = min(length, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
    sides = 2 if stage in ("reward", "dpo") else 1
    rows = (config.ppo.samples if stage == "ppo" else sides) * section.batch_size
    answers = math.ceil((rows if stage == "ppo" else config.evaluation.prompts) / shares)
    if stage == "ppo":
        rows = math.ceil(rows / config.ppo.minibatches)
    whole = math.ceil(rows / shares) * length  # a rank's share of a step may be less than a budget
    rollout = config.rollout
    on_cpu, packing = dist.world().device.type == "cpu", getattr(section, "packing", True)
    joined = packing and joins(architecture, engine.dtype, sequence=sequence)
    adapters, adapted = adapters_of(shape, section.lora) if section.lora.rank else (0, 0)
    return Workload(
        ranks=ranks,
        stage=engine.zero_stage,
        dtype=engine.dtype,
        offload_optimizer=engine.offload_optimizer,
        offload_parameters=engine.offload_parameters,
        checkpointing=engine.activation_checkpointing,
        micro_batch_tokens=_each(min(section.micro_batch_tokens, whole), whole, length, settings.pipeline_parallel),
        max_length=length,
        prompt=rollout.max_prompt_tokens,
        answer=rollout.max_new_tokens,
        rollout_batch=min(rollout.batch_size, answers * rollout.tensor_parallel),
        answers=answers * rollout.tensor_parallel,
        samples=config.ppo.samples if stage == "ppo" else 1,
        shard_ranks=engine.shard_ranks,
        offload_ratio=engine.offload_ratio,
        sub_group=engine.sub_group_size,
        moments=len(kinds(optimizer)),
        adapters=adapters,
        adapted=adapted,
        averages=stage == "ppo" and config.ppo.ema is not None,
        states=engine.states,
        errors=averages_itself(optimizer),
        on_cpu=on_cpu,
        in_place=not copies(torch.bfloat16),
        joins=joined,
        pieces=settings.pipeline_parallel,
        schedule=settings.pipeline_schedule,
        step_tokens=whole,
        sides=sides,
        copies=sides > 1 and packing and (joined or not on_cpu),  # the CPUs' kernel reads a prompt where it lies
        mixes=stage == "ppo" and config.ppo.ptx_coef > 0,
        sequence=sequence,
        keeps=rollout.keep,
        streams=rollout.stream,
        parks=rollout.park_optimizer and engine.offload_optimizer == "none",
        cache_bytes=rollout.cache_bytes,
    )


def adapters_of(shape: Shape, lora: LoraConfig) -> tuple[int, int]:
    """Parameters of the adapters (pipeline/models/adapters.py), and of the weights that they are beside."""

    def has_one(name: str, is_head: bool) -> bool:
        if lora.targets == "all-linear":
            return not is_head
        if isinstance(lora.targets, str):
            return re.fullmatch(lora.targets, f"model.{name}") is not None
        return any(name == target or name.endswith(f".{target}") for target in lora.targets)

    layers = [layer for layer in shape.linears if has_one(layer.name, layer.is_head)]
    return lora.rank * sum(layer.ins + layer.outs for layer in layers), sum(layer.numbers for layer in layers)


def joins(architecture: PretrainedConfig, dtype: Precision, *, sequence: int = 1) -> bool:
    """Whether packed rows are attended to one sequence at a time here (pipeline/models/attention.py), and joined, or
    what a kernel keeps of its output is sent on in a sequence group.
    """
    if getattr(architecture.get_text_config(), "attn_logit_softcapping", None):
        return True
    if dist.world().device.type == "cpu":
        return dtype == "fp16" or library("ragged_attention") is None
    return dtype == "fp32" or sequence > 1


def _each(tokens: int, whole: int, length: int, pieces: int) -> int:
    """Tokens of a micro-batch: a step that has fewer of them than a pipeline has pieces is cut further."""
    while math.ceil(whole / tokens) < pieces and tokens > length:
        tokens = max(length, math.ceil(tokens / 2))
    return tokens


def this_room(settings: EngineSettings, ranks: int) -> Room:
    """What a rank may have of this machine: a device of its own or a share of the host, and a share of the disk."""
    machine = this_machine(settings.nvme_path)
    here = min(ranks, machine.devices) if machine.devices else ranks
    disk, host = machine.disk // here, machine.host // here
    return Room(machine.device if machine.device is not None else host, host, disk, machine.device is not None)


def beyond_settings(stage: str) -> str:
    """What is left where no layout fits."""
    return f"more ranks (ranks=N), adapters ({stage}.lora.rank=16) or a smaller model (model=NAME)"


def require_fit(found: Plan, *, refuse: bool) -> list[str]:
    """Lines to print at the start of a stage. Raises UserError where it can't fit and `refuse` is set."""
    if found.fits:
        return [found.line]
    what = f"No setting of the engine makes it fit; what may: {beyond_settings(found.task.stage)}"
    if found.advice is not None:
        what = f"What would fit: {found.advice.words(found.task.stage, found.task.work)}"
    if found.demand.peak <= found.room.device:
        return [found.line, f"memory: that is tight. {what}"]
    if refuse:
        raise UserError(f"{found.line}: it does not fit. {what}")
    return [found.line, f"memory: that is more than there is. {what}"]
