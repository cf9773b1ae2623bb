"""A stage's part of the configuration as plain values for the engine, and what it will do, said before it begins."""

import math
import sys

import torch

from engine import Engine, OptimizerConfig, Sampling
from engine.parallel import dist
from pipeline.config.schema import RolloutSection, RunConfig, StageSection
from pipeline.config.stages import STAGES
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import is_rank_zero

FEW_STEPS = 20  # below which a stage has hardly begun to learn


def arrange(config: RunConfig) -> None:
    """Say which ranks see the same data, and seed what is drawn while training: alike where they compute the same."""
    settings = config.engine
    world = dist.arrange(
        tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel, sequence=settings.sequence_parallel
    )
    torch.manual_seed(config.seed * 1_000_003 + world.rank // world.tensor)


def optimizer_config(section: StageSection, *, steps: int, lr: float | None = None) -> OptimizerConfig:
    """AdamW and its schedule over `steps` optimizer steps."""
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


def stage_steps(section: StageSection, examples: int) -> int:
    """Batches in the stage's epochs, at most `steps`."""
    by_epochs = max(1, round(section.epochs * examples / section.batch_size))
    return by_epochs if section.steps is None else min(by_epochs, section.steps)


def sampling(rollout: RolloutSection, tokenizer: ChatTokenizer, *, seed: int) -> Sampling:
    """How answers are drawn, in rollouts and in evaluation alike."""
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        min_new_tokens=rollout.min_new_tokens,
        stop=tuple(rollout.stop),
        end_ids=tokenizer.end_ids,
        pad_id=tokenizer.pad_id,
        seed=seed,
    )


def prepare_generation(engine: Engine, rollout: RolloutSection) -> None:
    """Tell an engine how it will generate, before it does so for the first time."""
    engine.flip.tensor_parallel, engine.flip.stream = rollout.tensor_parallel, rollout.stream
    engine.flip.parity_check_every, engine.flip.cache_bytes = rollout.selfcheck_every, rollout.cache_bytes


def say_steps(stage: str, section: StageSection, steps: int, examples: int) -> None:
    """Say how much a stage will train on, and where that is next to nothing."""
    if not is_rank_zero():
        return
    word, what = STAGES[stage].step, STAGES[stage].examples
    several = f"{steps} {word}{'s' if steps > 1 else ''}"
    each, passes = section.batch_size, steps * section.batch_size / examples
    print(f"{stage}: {several} of {each} {what}, {passes:.2g} passes over {examples}", flush=True)
    if section.steps is None and steps < FEW_STEPS:
        more = f"{stage}.epochs={math.ceil(FEW_STEPS * each / examples)}, or a smaller {stage}.batch_size"
        print(f"warning: {stage}: {several} will hardly teach anything: {more}", file=sys.stderr, flush=True)
