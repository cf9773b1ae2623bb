"""Whether a stage fits, told before it starts: predicted bytes a device, and what to change where they exceed it.

A prediction is a sum of what is known (engine/memory); fragmentation and the library's own buffers are left to
`HEADROOM`. The rollout engine cuts its cache to what is free, so that only a few sequences of it are asked for. Left
out: engines of their own for PPO's models (`ppo.actor_engine` and so on); all are taken to be laid out alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine import EngineConfig
from engine.memory import Demand, Shape, Workload, ppo_demand, reward_demand, sft_demand
from engine.memory.machine import this_machine
from engine.memory.shapes import measured
from engine.parallel import dist
from pipeline.config.schema import RunConfig, StageSection
from pipeline.errors import UserError
from pipeline.models.build import EngineChoice
from pipeline.models.source import ModelSource

GIB = 2**30
HEADROOM = 0.92  # share of a device that a prediction may fill
LEAST_ROLLOUT = 8  # sequences that must be decodable together


@dataclass(frozen=True)
class Plan:
    """The prediction of one stage, what a device has, and settings that would fit, leanest last (empty: it fits)."""

    demand: Demand
    available: int
    advice: tuple[str, ...]

    @property
    def line(self) -> str:
        """memory: about X GiB of Y a device."""
        return f"memory: about {self.demand.peak / GIB:.1f} GiB of {self.available / GIB:.1f} a device ({self._owners})"

    @property
    def _owners(self) -> str:
        parts = sorted(self.demand.phases[self.demand.worst].items(), key=lambda part: -part[1])
        return f"{self.demand.worst}: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:4])


def plan(
    config: RunConfig, stage: str, *, policy: ModelSource, reward: ModelSource | None = None, ranks: int,
    available: int | None = None,
) -> Plan:  # fmt: skip
    """Predict a stage ("sft", "reward" or "ppo") on `ranks` ranks.

    `policy` is the model that is trained (the reward stage: that one), `reward` the base of reward model and critic.
    `available` are the bytes of one device, or on CPUs a rank's share of the host; measured by default.
    """
    shape = _shape(policy)
    critic = _shape(reward) if reward is not None else shape
    work = workload(config, stage, ranks)
    room = available if available is not None else _available(ranks)
    demand = _demand(stage, shape, critic, work)
    advice = () if demand.peak <= HEADROOM * room else tuple(_advice(stage, shape, critic, work, room))
    return Plan(demand, room, advice)


def require_fit(found: Plan, *, refuse: bool) -> list[str]:
    """Lines to print at the start of a stage. Raises UserError where it can't fit and `refuse` is set."""
    if found.demand.peak <= HEADROOM * found.available:
        return [found.line]
    what = "; ".join(found.advice) or "no setting of this engine makes it fit: more ranks, LoRA, or a smaller model"
    if refuse and found.demand.peak > found.available:
        raise UserError(f"{found.line}: it does not fit. What would: {what}")
    return [found.line, f"memory: that is tight. What would fit: {what}"]


def workload(config: RunConfig, stage: str, ranks: int) -> Workload:
    """The stage's settings in the engine's words."""
    section: StageSection = getattr(config, stage)
    engine: EngineConfig = EngineChoice(config.engine).layout()["config"]
    length = section.max_length
    if stage == "ppo":
        length = min(length, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
    return Workload(
        ranks=ranks,
        stage=engine.zero_stage,
        dtype=engine.dtype,
        offload_optimizer=engine.offload_optimizer,
        offload_parameters=engine.offload_parameters,
        checkpointing=engine.activation_checkpointing,
        micro_batch_tokens=section.micro_batch_tokens,
        max_length=length,
        prompt=config.rollout.max_prompt_tokens,
        answer=config.rollout.max_new_tokens,
        rollout_batch=min(config.rollout.batch_size, LEAST_ROLLOUT),
        trained_share=0.01 if section.lora.rank else 1.0,
    )


def _shape(source: ModelSource) -> Shape:
    return measured(source.name, source.config, source.attention)


def _demand(stage: str, shape: Shape, critic: Shape, work: Workload) -> Demand:
    if stage == "ppo":
        return ppo_demand(shape, critic, work, own_reference=work.trained_share == 1.0)
    return sft_demand(shape, work) if stage == "sft" else reward_demand(shape, work)


def _available(ranks: int) -> int:
    """A device's bytes; on CPUs the host's, shared by its ranks."""
    machine = this_machine()
    return machine.device if machine.device is not None else machine.host // ranks


def _advice(stage: str, shape: Shape, critic: Shape, work: Workload, room: int) -> Iterator[str]:
    """Changes that fit, from the cheapest in time: the first of each kind, then all together."""
    for words, choice in _ladder(stage, work):
        if _demand(stage, shape, critic, choice).peak <= HEADROOM * room:
            yield words
            return


def _ladder(stage: str, work: Workload) -> Iterator[tuple[str, Workload]]:
    """Leaner and leaner."""
    stages = [level for level in range(work.stage + 1, 4) if work.ranks > 1]
    for level in stages:
        yield f"engine.zero_stage={level}", replace(work, stage=level)
    lean = replace(work, checkpointing=True)
    yield "engine.activation_checkpointing=true", lean
    level = stages[-1] if stages else work.stage
    words = f"engine.zero_stage={level} engine.activation_checkpointing=true"
    yield words, replace(lean, stage=level)
    tokens = work.micro_batch_tokens
    while tokens > work.max_length:
        tokens = max(work.max_length, tokens // 2)
        smaller = replace(lean, stage=level, micro_batch_tokens=tokens)
        yield f"{words} {stage}.micro_batch_tokens={tokens}", smaller
    if torch.cuda.is_available() or work.offload_parameters != "none":
        smallest = replace(
            lean, stage=3, offload_optimizer="cpu", offload_parameters="cpu", micro_batch_tokens=tokens
        )
        yield f"engine=zero3-offload {stage}.micro_batch_tokens={tokens}", smallest


def announce(config: RunConfig, stage: str, *, policy: ModelSource, reward: ModelSource | None = None) -> None:
    """Print the prediction at the start of a stage, on the leading rank; refuse on GPUs what can't fit.

    A model that can't be predicted is run all the same, and that is said.
    """
    world = dist.world()
    try:
        found = plan(config, stage, policy=policy, reward=reward, ranks=world.size)
    except Exception as problem:
        lines = [f"memory: not predicted for {policy.name} ({type(problem).__name__}: {problem})"]
    else:
        lines = require_fit(found, refuse=world.device.type == "cuda")
    if world.leads:
        for line in lines:
            print(line, flush=True)
