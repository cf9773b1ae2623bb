"""Describe a stage to the planner: its models, their layout, and the sequences of one step."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine import OptimizerConfig
from engine.memory import (
    VLLM_SEQUENCES,
    GenerationLoad,
    ModelShape,
    ModelStates,
    Workload,
    frozen_states,
    largest_pipeline_stage,
    measure_shape,
    trained_states,
)
from pipeline.config.schema import EngineSettings, RunConfig
from pipeline.config.stage_sections import LoraConfig, PpoSection, StageSection
from pipeline.errors import UserError
from pipeline.models.build import EngineChoice
from pipeline.models.quantized import BYTES_PER_WEIGHT
from pipeline.models.source import ModelSource
from pipeline.planning.data_size import DataSize

# Sequences that a rank decodes at a time, unless memory permits more: in the decode loop, and for which vLLM has pages.
DECODE_BATCH, PAGED_SEQUENCES = 64, 8


@dataclass(frozen=True)
class StageModel:
    """One model of a stage: its shape, its layout and its micro-batches.

    A model of kind "shared" scores with the parameters of another one: the reference is the actor without its adapters.
    `own` are keys of `engine` that only this model has.
    """

    shape: ModelShape
    work: Workload = field(default_factory=Workload)
    kind: Literal["trained", "frozen", "shared"] = "trained"
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> ModelStates:
        """The bytes that the model holds."""
        if self.kind == "shared":
            return ModelStates()
        return (trained_states if self.kind == "trained" else frozen_states)(self.shape, self.work)


@dataclass(frozen=True)
class StageTask:
    """A stage ("sft", "reward", "dpo" or "ppo") as the planner sees it.

    The first of `models` is the policy, in a pipeline its largest stage. `generates` is the policy's shape as it is
    split for generation (default: the same).
    A step has `sequences` over all ranks, `passes` over them, and `updates` optimizer steps a pass. `shares_forward`:
    PPO keeps its forwards from scoring to the first update; None decides by memory. `fills_memory`: memory decides how
    many sequences decode at a time. The stage has `steps` steps. A sequence has `tokens` tokens on average and an
    answer of a rollout `response` (0: the largest length). The evaluations of the stage answer `answered` prompts and
    score `scored` sequences.
    """

    stage: str
    models: Mapping[str, StageModel]
    load: GenerationLoad = field(default_factory=GenerationLoad)
    generates: ModelShape | None = None
    shares_forward: bool | None = False
    fills_memory: bool = False
    sequences: int = 1
    passes: int = 1
    updates: int = 1
    steps: int = 1
    tokens: float = 0.0
    response: float = 0.0
    answered: int = 0
    scored: int = 0

    @property
    def policy(self) -> StageModel:
        return next(iter(self.models.values()))

    @property
    def generated(self) -> ModelShape:
        """The shape of the policy as it generates."""
        return self.generates or self.policy.shape

    @property
    def work(self) -> Workload:
        """The layout and micro-batches of a model that has no settings of its own."""
        return next((model.work for model in self.models.values() if not model.own), self.policy.work)

    @property
    def length(self) -> float:
        """Mean tokens of a sequence."""
        return self.tokens or self.work.max_length

    @property
    def response_length(self) -> float:
        """Mean tokens of a rollout's answer."""
        return self.response or self.load.response

    def with_setting(self, engine: Mapping[str, Any], tokens: int) -> "StageTask":
        """Return the task with other values of keys of `engine`, and `tokens` in a micro-batch."""

        def changed(model: StageModel) -> StageModel:
            keys = {key: value for key, value in engine.items() if key not in model.own}
            work = replace(model.work, config=replace(model.work.config, **keys), micro_batch_tokens=tokens)
            return replace(model, work=work)

        return replace(self, models={name: changed(model) for name, model in self.models.items()})


@dataclass(frozen=True)
class PlanInputs:
    """The models and the data that a stage is planned with.

    policy: the language model
    reward: the base of reward model and critic (default: `policy`)
    size: the size of the data; None: the stage has one step of sequences of the largest length
    later: the sizes of the data of later stages, as far as they are known
    """

    policy: ModelSource
    reward: ModelSource | None = None
    size: DataSize | None = None
    later: Mapping[str, DataSize] = field(default_factory=dict)


def stage_task(config: RunConfig, stage: str, inputs: PlanInputs, *, ranks: int, is_cpu: bool) -> StageTask:
    """Describe a stage on `ranks` ranks."""
    reward, size = inputs.reward or inputs.policy, inputs.size
    policy = reward if stage == "reward" else inputs.policy
    ppo, is_ppo = config.ppo, stage == "ppo"
    shape = _shape(policy, config.engine.tensor_parallel, scores=stage == "reward")
    generates = None
    if config.rollout.tensor_parallel != config.engine.tensor_parallel and stage != "reward":
        generates = _shape(policy, config.rollout.tensor_parallel)
    layout = frozen_parameters(shape, getattr(config, stage).lora, policy.quantize)
    if is_ppo:
        models = _ppo_models(config, ranks, shape, layout, reward, is_cpu=is_cpu)
    else:
        if (pipeline := config.engine.pipeline_parallel) > 1:  # a rank trains its stage, and generates with all blocks
            generates, shape = generates or shape, largest_pipeline_stage(shape, pipeline)
            layout = layout | {"adapters": math.ceil(layout["adapters"] / pipeline)}
        models = {"policy": StageModel(shape, workload(config, stage, ranks, config.engine, layout, is_cpu=is_cpu))}
    load = _generation_load(config, stage, ranks)
    may_share = is_ppo and ppo.minibatches == 1 and config.engine.pipeline_parallel == 1
    may_share = may_share and ppo.unfinished == "penalize"  # otherwise an update leaves out sequences
    return StageTask(
        stage,
        models,
        load,
        generates,
        shares_forward=ppo.shared_forward if may_share else False,
        fills_memory=_fills_memory(config, stage, is_cpu=is_cpu),
        sequences=_rows(config, stage),
        passes=ppo.update_epochs if is_ppo else 1,
        updates=ppo.minibatches if is_ppo else 1,
        **({} if size is None else _length_of_stage(config, stage, size)),
    )


def _ppo_models(
    config: RunConfig, ranks: int, shape: ModelShape, layout: Mapping[str, Any], base: ModelSource, *, is_cpu: bool
) -> dict[str, StageModel]:
    """Return the models of PPO. Actor and reference have `shape`; critic and reward models are built from `base`."""
    ppo = config.ppo

    def model(role: str, shape: ModelShape, kind: Literal["trained", "frozen", "shared"], fields: Any) -> StageModel:
        own = getattr(ppo, f"{role}_engine")
        settings = config.engine.changed_by(own) if own else config.engine
        return StageModel(shape, workload(config, "ppo", ranks, settings, fields, is_cpu=is_cpu), kind, own)

    extra = {"has_average": ppo.ema is not None, "has_other_loss": ppo.ptx_coef > 0}
    models = {"actor": model("actor", shape, "trained", {**layout, **extra})}
    if ppo.needs_reference:
        is_shared = layout["adapters"] > 0
        models["reference"] = model("reference", shape, "shared" if is_shared else "frozen", layout)
    if ppo.advantage == "gae" or ppo.reward_model:
        scorer = _shape(base, config.engine.tensor_parallel, scores=True)
        lora = ppo.lora if base.quantize != "none" else LoraConfig()
        scorer_layout = frozen_parameters(scorer, lora, base.quantize)
        if ppo.advantage == "gae":
            models["critic"] = model("critic", scorer, "trained", scorer_layout)
        for number in range(1, 1 + (1 + len(ppo.reward_ensemble) if ppo.reward_model else 0)):
            name = "reward" if number == 1 else f"reward_{number}"
            models[name] = model("reward", scorer, "frozen", scorer_layout)
    return models


def stage_steps(section: StageSection, examples: int) -> int:
    """Return the number of batches in the epochs of a stage, at most `section.steps`.

    Raises UserError if `ppo.critic_warmup` leaves no step that trains the actor.
    """
    by_epochs = max(1, round(section.epochs * examples / section.batch_size))
    steps = by_epochs if section.steps is None else min(by_epochs, section.steps)
    if isinstance(section, PpoSection) and section.critic_warmup >= steps:
        raise UserError(
            f"ppo.critic_warmup={section.critic_warmup} leaves no rollout that trains the actor: the number of "
            f"rollouts is {steps} (ppo.epochs={section.epochs:g} over {examples} prompts). Lower ppo.critic_warmup, or "
            "raise ppo.epochs"
        )
    return steps


def _length_of_stage(config: RunConfig, stage: str, size: DataSize) -> dict[str, Any]:
    """Return the fields of a task that depend on the data.

    SFT and DPO evaluate the models before and after training, PPO every evaluated step and the start. DPO scores the
    held-out pairs once more at its end, and its reference scores each pair once.
    """
    section = getattr(config, stage)
    prompts, examples = config.evaluation.prompts, section.eval_examples
    if size.held_out is not None:
        prompts, examples = min(prompts, size.held_out), min(examples, size.held_out)
    steps = stage_steps(section, size.rows)
    evaluations = 1 + ((steps - 1) // section.eval_every if section.eval_every else 0)
    answers = prompts * len(config.temperatures)
    answered = {
        "sft": 2 * answers,
        "reward": 0,
        "dpo": 2 * answers,
        "ppo": answers * (1 + evaluations) + prompts * (config.evaluation.best_of - 1),
    }[stage]
    pair = item_sequences(config, stage)
    scored = evaluations * pair * examples
    if stage == "dpo":
        scored += pair * examples
        if config.dpo.has_reference:
            scored += pair * (examples + min(size.rows, steps * section.batch_size))
    response, tokens = 0.0, 0.0
    if stage == "ppo":
        response = min(size.answer or math.inf, config.rollout.max_new_tokens)
        prompt = min(size.prompt or math.inf, config.rollout.max_prompt_tokens)
        tokens, scored = prompt + response, answered
    elif size.prompt is not None:
        tokens = min(size.prompt + (size.answer or 0.0), section.max_length)
    return {"steps": steps, "tokens": tokens, "response": response, "answered": answered, "scored": scored}


def workload(
    config: RunConfig, stage: str, ranks: int, settings: EngineSettings, fields: Mapping[str, Any], *, is_cpu: bool
) -> Workload:
    """Return the layout and the micro-batches of a model; `fields` are those of `Workload` that are its own."""
    section: StageSection = getattr(config, stage)
    # The number of steps changes no bytes; schedules of a DeepSpeed file need one.
    layout = EngineChoice(settings, OptimizerConfig(lr=section.lr, total_steps=section.steps or 1)).layout()
    length = longest_sequence(config, stage)
    rows = math.ceil(_rows(config, stage) / (config.ppo.minibatches if stage == "ppo" else 1))
    step_tokens = math.ceil(rows / data_ranks(settings, ranks)) * length
    # A step has a micro-batch for each pipeline stage; a sequence is never split.
    most = max(length, math.ceil(step_tokens / settings.pipeline_parallel))
    return Workload(
        layout["config"],
        ranks // (settings.tensor_parallel * settings.pipeline_parallel),
        micro_batch_tokens=min(section.micro_batch_tokens, most),
        max_length=length,
        step_tokens=step_tokens,
        item_sequences=item_sequences(config, stage),
        optimizer=layout["optimizer"],
        is_cpu=is_cpu,
        **fields,
    )


def frozen_parameters(shape: ModelShape, lora: LoraConfig, quantize: str) -> dict[str, Any]:
    """Return the fields of a `Workload` that describe adapters and a model in 4 bits."""
    adapters = adapter_parameters(shape, lora) if lora.rank else 0
    packed = sum(layer.parameters for layer in shape.linears if not layer.is_head) if quantize != "none" else 0
    return {"adapters": adapters, "packed": packed, "packed_bytes": round(BYTES_PER_WEIGHT * packed)}


def adapter_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Return the parameters of the adapters (pipeline/models/adapters.py)."""

    def is_target(name: str, is_head: bool) -> bool:
        if lora.targets == "all-linear":
            return not is_head
        if isinstance(lora.targets, str):
            return re.fullmatch(lora.targets, f"model.{name}") is not None
        return any(name == target or name.endswith(f".{target}") for target in lora.targets)

    return lora.rank * sum(sum(layer.shape) for layer in shape.linears if is_target(layer.name, layer.is_head))


def _generation_load(config: RunConfig, stage: str, ranks: int) -> GenerationLoad:
    rollout, uses_vllm = config.rollout, config.rollout.generator == "vllm"
    most = rollout.batch_size or DECODE_BATCH
    if uses_vllm:
        most = VLLM_SEQUENCES if rollout.cache_bytes is not None else PAGED_SEQUENCES
    answers = _rows(config, stage) if stage == "ppo" else config.evaluation.prompts
    sequences = math.ceil(answers / data_ranks(config.engine, ranks)) * rollout.tensor_parallel
    return GenerationLoad(
        prompt=rollout.max_prompt_tokens,
        response=rollout.max_new_tokens,
        slots=min(most, sequences),
        sequences=sequences,
        samples=config.ppo.samples if stage == "ppo" else 1,
        keep=rollout.keep,
        stream=rollout.stream,
        park_optimizer=rollout.park_optimizer,
        cache_bytes=rollout.cache_bytes,
        uses_vllm=uses_vllm,
    )


def _fills_memory(config: RunConfig, stage: str, *, is_cpu: bool) -> bool:
    if config.rollout.generator == "vllm":
        return config.rollout.cache_bytes is None and stage != "reward"
    return config.rollout.batch_size is None and stage == "ppo" and not is_cpu


def _rows(config: RunConfig, stage: str) -> int:
    """Return the sequences of a step over all ranks."""
    per_item = config.ppo.samples if stage == "ppo" else item_sequences(config, stage)
    return int(getattr(config, stage).batch_size) * per_item


def item_sequences(config: RunConfig, stage: str) -> int:
    """Return the sequences that a micro-batch does not divide: two for a pair."""
    return 2 if stage == "reward" or (stage == "dpo" and config.dpo.reads_pairs) else 1


def longest_sequence(config: RunConfig, stage: str) -> int:
    """Return the largest number of tokens in a sequence of a stage."""
    length = int(getattr(config, stage).max_length)
    return min(length, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens) if stage == "ppo" else length


def data_ranks(settings: EngineSettings, ranks: int) -> int:
    """Return the ranks, or groups of ranks, that see different data."""
    return ranks // (settings.tensor_parallel * settings.pipeline_parallel * settings.sequence_parallel)


def _shape(source: ModelSource, ranks: int, *, scores: bool = False) -> ModelShape:
    return measure_shape(source.name, source.config, source.attention, ranks, source.tensor_plan, scores=scores)
