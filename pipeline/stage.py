"""What every stage does at its edge: plain values for the engine, and the stage's inputs."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine import Engine, OptimizerConfig, Sampling
from engine.parallel import dist
from pipeline.config.schema import RolloutSection, RunConfig, StageSection
from pipeline.config.stages import ANSWERING, STAGES, wanted_stages
from pipeline.data.formats import Record
from pipeline.data.load import load_stage
from pipeline.data.records import Preference
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer, train_tokenizer
from pipeline.errors import UserError
from pipeline.models.build import check_scores
from pipeline.models.source import ModelSource, check_kind, download, model_folder, resolve

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


def run_tokenizer(
    config: RunConfig, run_dir: Path, given: Path | None = None, *, trained_on: Sequence[Record] = ()
) -> ChatTokenizer:
    """The run's one tokenizer, kept in RUN/tokenizer: a given model's, the model's own, or one trained on the data.

    `trained_on`: SFT's records, where they have been read already; else they are read here, if they are wanted.
    """
    kept = run_dir / "tokenizer"
    if given is not None:
        return load_tokenizer(str(model_folder(given)), chat_template=None)
    if dist.world().leads and not (kept / "tokenizer_config.json").exists():
        made = _make_tokenizer(config, trained_on)
        staging = run_dir / "tokenizer.tmp"
        made.save(staging)
        staging.rename(kept)
    dist.barrier()  # of all ranks, each time: one that comes late finds the tokenizer made
    return load_tokenizer(str(kept), chat_template=None)


def _make_tokenizer(config: RunConfig, trained_on: Sequence[Record]) -> ChatTokenizer:
    model = config.model
    if model.tokenizer not in (None, "train"):
        return load_tokenizer(str(model.tokenizer), chat_template=model.chat_template)
    if model.weights == "pretrained" and model.tokenizer is None:
        folder = model_folder(Path(model.path)) if model.path else download(str(model.hub), weights=False)
        return load_tokenizer(str(folder), chat_template=model.chat_template)
    size = int((model.architecture or {}).get("vocab_size", 1024))
    records = trained_on or next((found for stage in STAGES if (found := _records_or_none(config, stage))), [])
    return train_tokenizer((text for record in records for text in _texts(record)), size)


def _records_or_none(config: RunConfig, stage: str) -> list[Record]:
    try:
        return load_stage(config.data, stage, config.seed).train
    except UserError:
        return []


def _texts(record: Record) -> list[str]:
    if isinstance(record, Preference):
        return [*(m.content for m in record.prompt), record.chosen]
    return [m.content for m in record.messages]


def base_source(config: RunConfig) -> ModelSource:
    """The base model of the policy."""
    return resolve(config.model, config.seed)


def stage_source(config: RunConfig, folder: Path) -> ModelSource:
    """What a stage left in its folder (or a model folder)."""
    return resolve(config.model, config.seed, folder=folder)


def policy_to_tune(config: RunConfig, folder: Path) -> tuple[ModelSource, ChatTokenizer]:
    """The language model that DPO or PPO starts from, of a stage's folder or a model folder, and its tokenizer.

    Raises UserError where the folder has a model of another kind, or too few embedding rows.
    """
    source = stage_source(config, folder)
    check_kind(source, wanted="ForCausalLM")
    tokenizer = load_tokenizer(str(model_folder(folder)), chat_template=None)
    check_vocabulary(source, tokenizer)
    return source, tokenizer


def check_vocabulary(source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Refuse a model whose embedding has no row for some of the tokenizer's ids."""
    rows = source.config.get_text_config().vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, model {source.name} only {rows} embedding rows; "
            "give the tokenizer that belongs to the model (model.tokenizer=FOLDER), or, where tokens were added to it, "
            "save the model again after resize_token_embeddings"
        )


def adopt_special_ids(source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Random weights take the tokenizer's special ids; the family's defaults belong to another vocabulary.

    With those, OPT would give the token of its default padding id no gradient, and config.json would name wrong ends.
    """
    if source.folder is None:
        source.config.bos_token_id = tokenizer.hf.bos_token_id
        source.config.eos_token_id = tokenizer.end_id
        source.config.pad_token_id = None if tokenizer.pad_id in tokenizer.end_ids else tokenizer.pad_id


def context_length(source: ModelSource) -> int | None:
    """How many positions the model has, where its configuration says."""
    return getattr(source.config.get_text_config(), "max_position_embeddings", None)


def require_context(config: RunConfig, stage: str, source: ModelSource) -> None:
    """Refuse lengths that the model has no positions for: this stage's, and of the stages to come that work on it.

    So nobody learns after a day of SFT that PPO can't begin.
    """
    has = context_length(source)
    if has is None:
        return
    stages = wanted_stages(config)
    coming = stages[stages.index(stage) :] if stage in stages else [stage]
    if stage in ANSWERING:  # held-out prompts, as PPO's rollouts are; the reward model may be another one
        others = () if config.reward_model is None else ("reward",)
        coming = [name for name in dict.fromkeys((*coming, "ppo")) if name not in others]
    mistakes = [mistake for name in coming if (mistake := _too_long(config, name, has)) is not None]
    if mistakes:
        raise UserError(f"{source.name} has {has} positions for a sequence, too few for " + "; for ".join(mistakes))


def _too_long(config: RunConfig, stage: str, has: int) -> str | None:
    """What to do about a stage's lengths where they are more than `has`."""
    if stage == "ppo":  # whose sequences are drawn, not read
        prompt, answer = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
        advice = f"rollout.max_prompt_tokens={prompt} and rollout.max_new_tokens={answer}: {has} or less together"
        return advice if prompt + answer > has else None
    length = getattr(config, stage).max_length
    return f"{stage}.max_length={length}: set it to {has} or less" if length > has else None


def require_scorer(config: RunConfig, source: ModelSource) -> None:
    """Refuse what the stages to come can make no reward model or critic of, before SFT rather than after it."""
    stages = wanted_stages(config)
    if "reward" in stages and config.reward_model is not None:
        if config.reward_model.hub is None:  # else it would have to be fetched first
            check_scores(resolve(config.reward_model, config.seed))
    elif "reward" in stages or ("ppo" in stages and not config.ppo.reward_model and config.ppo.advantage == "gae"):
        check_scores(source)


def prepare_generation(engine: Engine, rollout: RolloutSection) -> None:
    """Tell an engine how it will generate, before it does so for the first time."""
    engine.flip.tensor_parallel, engine.flip.stream = rollout.tensor_parallel, rollout.stream
    engine.flip.selfcheck_every, engine.flip.cache_bytes = rollout.selfcheck_every, rollout.cache_bytes


def say_steps(stage: str, section: StageSection, steps: int, examples: int) -> None:
    """Say how much a stage will train on, and where that is next to nothing."""
    if not dist.world().leads:
        return
    word, what = STAGES[stage].step, STAGES[stage].examples
    several = f"{steps} {word}{'s' if steps > 1 else ''}"
    each, passes = section.batch_size, steps * section.batch_size / examples
    print(f"{stage}: {several} of {each} {what}, {passes:.2g} passes over {examples}", flush=True)
    if section.steps is None and steps < FEW_STEPS:
        more = f"{stage}.epochs={math.ceil(FEW_STEPS * each / examples)}, or a smaller {stage}.batch_size"
        print(f"warning: {stage}: {several} will hardly teach anything: {more}", file=sys.stderr, flush=True)
