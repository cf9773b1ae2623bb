"""The configuration of a stage as plain values for the engine."""

import math
import sys

from engine import Engine, OptimizerConfig, Sampling
from pipeline.config.schema import RolloutSection, StageSection
from pipeline.config.stages import STAGES
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import is_rank_zero

FEW_STEPS = 20  # below which a stage has hardly begun to learn


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


def stage_steps(section: StageSection, examples: int) -> int:
    """Return the number of batches in the epochs of a stage, at most `section.steps`."""
    by_epochs = max(1, round(section.epochs * examples / section.batch_size))
    return by_epochs if section.steps is None else min(by_epochs, section.steps)


def sampling(rollout: RolloutSection, tokenizer: ChatTokenizer, *, seed: int) -> Sampling:
    """Return the sampling settings, which rollouts and evaluation share."""
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
    """Set how an engine generates. Call before its first generation."""
    engine.flip.tensor_parallel, engine.flip.stream = rollout.tensor_parallel, rollout.stream
    engine.flip.parity_check_every, engine.flip.cache_bytes = rollout.parity_check_every, rollout.cache_bytes


def log_steps(stage: str, section: StageSection, steps: int, examples: int) -> None:
    """Print how much a stage trains on, and a warning if the steps are too few to learn from."""
    if not is_rank_zero():
        return
    word, what = STAGES[stage].step, STAGES[stage].examples
    several = f"{steps} {word}{'s' if steps > 1 else ''}"
    each, passes = section.batch_size, steps * section.batch_size / examples
    print(f"{stage}: {several} of {each} {what}, {passes:.2g} passes over {examples}", flush=True)
    if section.steps is None and steps < FEW_STEPS:
        more = f"{stage}.epochs={math.ceil(FEW_STEPS * each / examples)}, or a smaller {stage}.batch_size"
        print(f"warning: {stage}: {several} will hardly teach anything: {more}", file=sys.stderr, flush=True)
