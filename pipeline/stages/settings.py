"""Convert the configuration of a stage to plain values for the engine."""

import math
import sys

from engine import Engine, OptimizerConfig, Sampling
from pipeline.config.schema import RolloutSection, StageSection
from pipeline.config.stages import STAGES
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import is_rank_zero

FEW_STEPS = 20  # with fewer steps a stage learns little


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
    """Print the numbers of steps and examples of a stage, and a warning if there are too few steps."""
    if not is_rank_zero():
        return
    unit, kind = STAGES[stage].step, STAGES[stage].examples
    counted_steps = f"{steps} {unit}{'s' if steps > 1 else ''}"
    batch_size, passes = section.batch_size, steps * section.batch_size / examples
    print(f"{stage}: {counted_steps} of {batch_size} {kind}, {passes:.2g} passes over {examples}", flush=True)
    if section.steps is None and steps < FEW_STEPS:
        advice = f"{stage}.epochs={math.ceil(FEW_STEPS * batch_size / examples)}, or a smaller {stage}.batch_size"
        print(f"warning: {stage}: {counted_steps} will hardly teach anything: {advice}", file=sys.stderr, flush=True)
