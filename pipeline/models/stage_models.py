"""The model and the tokenizer that a stage starts from, and what is refused of them before any work."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.config.stages import ANSWERING, STAGES, wanted_stages
from pipeline.data.formats import Record
from pipeline.data.load import load_stage
from pipeline.data.records import Preference
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer, train_tokenizer
from pipeline.distributed import barrier, is_rank_zero
from pipeline.errors import UserError
from pipeline.models.build import check_adapters, check_scores
from pipeline.models.source import ModelSource, check_kind, download, model_folder, resolve


def run_tokenizer(
    config: RunConfig, run_dir: Path, given: Path | None = None, *, trained_on: Sequence[Record] = ()
) -> ChatTokenizer:
    """The run's one tokenizer, kept in RUN/tokenizer: a given model's, the model's own, or one trained on the data.

    `trained_on`: SFT's records, where they have been read already; else they are read here, if they are wanted.
    """
    kept = run_dir / "tokenizer"
    if given is not None:
        return load_tokenizer(str(model_folder(given)), chat_template=None)
    if is_rank_zero() and not (kept / "tokenizer_config.json").exists():
        made = _make_tokenizer(config, trained_on)
        staging = run_dir / "tokenizer.tmp"
        made.save(staging)
        staging.rename(kept)
    barrier()  # of all ranks, each time: one that comes late finds the tokenizer made
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


def require_context(config: RunConfig, stage: str, source: ModelSource) -> None:
    """Refuse lengths that the model has no positions for: this stage's, and of the stages to come that work on it.

    So nobody learns after a day of SFT that PPO can't begin.
    """
    has = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if has is None:  # it does not say
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


def require_adapters(config: RunConfig, source: ModelSource) -> None:
    """Refuse targets of the stages to come that match nothing in their models, before SFT rather than after it."""
    for stage in wanted_stages(config):
        lora = getattr(config, stage).lora
        if stage == "sft" or not lora.rank or lora.targets == "all-linear":
            continue
        other = config.reward_model if stage == "reward" else None
        if other is not None and other.hub is not None:  # which would have to be fetched first
            continue
        try:
            adapted = source if other is None else resolve(other, config.seed)
            check_adapters(adapted, lora, scores=stage == "reward")
        except UserError as problem:
            raise UserError(f"{stage}.{problem}") from problem
