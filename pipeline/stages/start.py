"""Start a stage: convert its configuration to values for the engine, plan its memory and open its folder."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, OptimizerConfig, Sampling, distributed, kernels
from pipeline import progress
from pipeline.config.schema import RolloutSection, RunConfig
from pipeline.config.stage_sections import StageSection
from pipeline.config.stages import STAGES, example_unit
from pipeline.data.records import Prompt
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluator
from pipeline.evaluation.judge import load_judge
from pipeline.files import read_plan
from pipeline.models.build import DTYPE, EngineChoice
from pipeline.models.source import ModelSource
from pipeline.planning.data_size import DataSize, size_of
from pipeline.planning.planner import fit_settings
from pipeline.planning.stage_task import PlanInputs, data_ranks, item_sequences, longest_sequence, stage_steps
from pipeline.stages.data import return_memory_of_texts
from pipeline.stages.stage_run import StageRun
from pipeline.tracking.watchers import open_watchers

FEW_STEPS = 20  # with fewer steps a stage learns little
SLOW_SHARE = 0.75  # of the rate of fp32; a precision below it is slow on this CPU


def optimizer_config(section: StageSection, *, steps: int, lr: float | None = None) -> OptimizerConfig:
    """Return the settings of AdamW and its learning rate schedule over `steps` optimizer steps."""
    return OptimizerConfig(
        lr=section.lr if lr is None else lr,
        total_steps=steps,
        warmup_steps=round(section.warmup * steps),
        schedule=section.schedule,
        final_lr_ratio=section.final_lr_ratio,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
    )


def sampling(rollout: RolloutSection, tokenizer: ChatTokenizer, *, seed: int) -> Sampling:
    """Return the sampling settings, which rollouts and evaluation share. Keys and fields have the same names."""
    settings = rollout.model_dump(include={each.name for each in fields(Sampling)})
    return Sampling(**settings | {"stop": tuple(rollout.stop)}, end_ids=tokenizer.end_ids, seed=seed)


def build_evaluator(config: RunConfig, tokenizer: ChatTokenizer, prompts: Sequence[Prompt]) -> Evaluator:
    """Return the evaluator of a policy on held-out prompts. Every stage samples with the same noise."""
    settings = sampling(config.rollout, tokenizer, seed=EVALUATION_SEED)
    return Evaluator(prompts, tokenizer, settings, config.temperatures, load_judge(config))


def prepare_generation(engine: Engine, rollout: RolloutSection) -> None:
    """Set how an engine generates. Call before its first generation."""
    engine.flip.tensor_parallel, engine.flip.stream = rollout.tensor_parallel, rollout.stream
    engine.flip.parity_check_every, engine.flip.cache_bytes = rollout.parity_check_every, rollout.cache_bytes
    engine.flip.uses_vllm = rollout.generator == "vllm"


def log_steps(stage: str, section: StageSection, steps: int, examples: int) -> None:
    """Print the numbers of steps and examples of a stage, and a warning if there are too few steps."""
    if not distributed.is_rank_zero():
        return
    unit, kind = STAGES[stage].step, example_unit(stage, section)
    counted_steps = f"{steps} {unit}{'s' if steps > 1 else ''}"
    batch_size, count = section.batch_size, steps * section.batch_size / examples
    passes = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
    passes += " pass" if passes == "1" else " passes"
    limit = ""
    if section.steps is not None and steps < section.steps:
        epochs = _epochs_for(section.steps, batch_size, examples)
        reason = f"{stage}.epochs={section.epochs:g} ends before {stage}.steps={section.steps}"
        limit = f"; {reason}: set {stage}.epochs={epochs}"
    print(f"{stage}: {counted_steps} of {batch_size} {kind}, {passes} over {examples}{limit}", flush=True)
    if warning := few_steps(stage, section, steps, examples):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def slow_precision(dtype: str, rate: Callable[[torch.dtype], float] | None = None) -> str | None:
    """Return a warning if this CPU multiplies matrices of `dtype` clearly more slowly than those of fp32.

    `rate` measures the products per second of a dtype. Without it, small matrices are multiplied.
    """
    if dtype == "fp32":
        return None
    rate = rate or _products_per_second
    share = rate(DTYPE[dtype]) / rate(torch.float32)
    if share >= SLOW_SHARE:
        return None
    return (
        f"this processor multiplies {dtype} matrices at {share:.0%} of the speed of fp32: engine.dtype=fp32 is faster"
    )


def _products_per_second(dtype: torch.dtype) -> float:
    """Return how many products of small matrices the CPU computes per second: the best of about 50 ms."""
    matrix, best = torch.ones(256, 256, dtype=dtype), math.inf
    torch.mm(matrix, matrix)  # loads the library
    end = time.perf_counter() + 0.05
    while best == math.inf or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 1 / best


def batch_line(config: RunConfig, stage: str, ranks: int) -> str:
    """Return how ranks, micro-batches and accumulation make the batch of one optimizer step, at full length."""
    section, groups, length = getattr(config, stage), data_ranks(config.engine, ranks), longest_sequence(config, stage)
    rows, kind, group = section.batch_size, example_unit(stage, section), ranks // max(1, groups)
    if stage == "ppo":
        rows, kind = rows * config.ppo.samples // config.ppo.minibatches, "answers"
    share = math.ceil(rows / max(1, groups))
    fitting = min(share, max(1, section.micro_batch_tokens // (length * item_sequences(config, stage))))
    noun, size = ("rank", "") if group == 1 else ("group", f" of {group} ranks")
    unit = f"{noun}{'s' if groups > 1 else ''}{size}"
    return (
        f"batch of {rows} {kind} = {groups} {unit} x micro-batch of {fitting} x accumulation over "
        f"{math.ceil(share / fitting)} (with {length} tokens each; shorter {kind} need fewer micro-batches)"
    )


def steps_line(config: RunConfig, stage: str, steps: int) -> str:
    """Return the optimizer steps of a stage. `steps`: steps, or rollouts of PPO."""
    if stage != "ppo":
        return f"{steps:,} optimizer step{'s' if steps > 1 else ''}"
    epochs, minibatches = config.ppo.update_epochs, config.ppo.minibatches
    factors = ((steps, "rollout", "s"), (epochs, "epoch", "s"), (minibatches, "minibatch", "es"))
    product = " x ".join(f"{number:,} {noun}{plural if number > 1 else ''}" for number, noun, plural in factors)
    return f"{steps * epochs * minibatches:,} optimizer steps ({product})"


def few_steps(stage: str, section: StageSection, steps: int, examples: int) -> str:
    """Return a warning if the data and the epochs of a stage give few steps, else "".

    A limit that the user has set (`section.steps`) causes no warning. A step of PPO is a rollout.
    """
    if section.steps is not None or steps >= FEW_STEPS:
        return ""
    epochs = _epochs_for(FEW_STEPS, section.batch_size, examples)
    step = STAGES[stage].step
    return (
        f"{stage}: {steps} {step}{'s' if steps > 1 else ''} will hardly change the model: for {FEW_STEPS} {step}s set "
        f"{stage}.epochs={epochs} or a smaller {stage}.batch_size, or add data"
    )


def _epochs_for(steps: int, batch_size: int, examples: int) -> int:
    """Return a whole number of epochs that is enough for a number of steps."""
    return math.ceil(steps * batch_size / examples)


@dataclass(frozen=True)
class StagePlan:
    """The settings that a stage runs with.

    config: the configuration, with the settings that `engine=auto` chose
    predicted: bytes by phase and owner; empty if the memory of the model cannot be predicted
    """

    config: RunConfig
    steps: int
    predicted: Mapping[str, Mapping[str, int]]


def plan_stage(
    config: RunConfig,
    stage: str,
    folder: Path,
    examples: Sequence[Any],
    *,
    policy: ModelSource,
    reward: ModelSource | None = None,
    later: Mapping[str, DataSize] | None = None,
    held_out: int | None = None,
) -> StagePlan:
    """Log the number of steps and the predicted memory, choose settings for `engine=auto`, and seed torch.

    Call this when the records are deleted.

    `examples` are the encoded training examples. `later` are the sizes of the data of later stages (default: those that
    SFT found). `held_out` is the number of examples or prompts for evaluations. On a CPU, compile the kernels in C, so
    that no step waits for the compiler.
    """
    return_memory_of_texts()
    section = getattr(config, stage)
    steps = stage_steps(section, len(examples))
    log_steps(stage, section, steps, len(examples))
    arrange_ranks(config)
    if distributed.world().device.type == "cpu":
        reason = kernels.load_libraries()
        slow_kernels = f"PyTorch's slower operators replace the kernels in C: {reason}" if reason else ""
        for warning in (slow_precision(EngineChoice(config.engine).layout()["config"].dtype), slow_kernels):
            if warning and distributed.is_rank_zero():
                print(f"warning: {warning}", file=sys.stderr, flush=True)
    size, found_by_sft = replace(size_of(examples), held_out=held_out), read_plan(folder.parent / "sft")
    if size.answer is None:  # PPO's prompts: answers as long as those of SFT
        size = replace(size, answer=found_by_sft.get("answer_tokens"))
    if later is None:
        later = {each: DataSize(**fields) for each, fields in found_by_sft.get("later_sizes", {}).items()}
    config, predicted = fit_settings(config, stage, folder, PlanInputs(policy, reward, size, later))
    seed_torch(config)
    if distributed.is_rank_zero():
        print(f"{stage}: {batch_line(config, stage, distributed.world().size)}", flush=True)
        if stage == "ppo":  # a step of the other stages is one optimizer step
            print(f"{stage}: {steps_line(config, stage, steps)}", flush=True)
    return StagePlan(config, steps, predicted)


def arrange_ranks(config: RunConfig) -> None:
    """Group the ranks that share one model."""
    settings = config.engine
    distributed.set_parallelism(
        tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel, sequence=settings.sequence_parallel
    )


def seed_torch(config: RunConfig) -> None:
    """Seed torch. Ranks of a tensor-parallel group have the same seed.

    Call this after the prediction: only the first start of a stage measures the machine, with random numbers.
    """
    world = distributed.world()
    torch.manual_seed(config.seed * 1_000_003 + world.rank // world.tensor)


@contextmanager
def open_stage(
    plan: StagePlan,
    stage: str,
    folder: Path,
    engines: Mapping[str, Engine],
    *,
    best_metric: str,
    longest: int,
    extra: Callable[[], dict[str, Any]] = dict,
    restore_extra: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Iterator[StageRun]:
    """Open the folder of a stage with its progress display and trackers. The arguments are those of `StageRun`."""
    section = getattr(plan.config, stage)
    progress.own().configure(plan.config.engine.hang_seconds)
    with (
        open_watchers(plan.config, stage, folder, plan.steps) as watchers,
        StageRun(
            folder,
            section,
            plan.steps,
            engines,
            watchers=watchers,
            longest=longest,
            profile=plan.config.profile,
            best_metric=best_metric,
            extra=extra,
            restore_extra=restore_extra,
        ) as stage_run,
    ):
        stage_run.predicted = plan.predicted
        yield stage_run
