"""The model and the tokenizer of a stage, and checks that raise UserError before any work starts."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine import distributed
from pipeline.config.schema import RunConfig
from pipeline.config.stages import ANSWERING, STAGES, stages_to_run
from pipeline.data.load import load_stage
from pipeline.data.records import Message, Preference, Record
from pipeline.data.template import THINKING
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer, with_template
from pipeline.errors import UserError
from pipeline.files import sync
from pipeline.models.build import check_adapters, check_scores
from pipeline.models.folder import model_folder
from pipeline.models.source import ModelSource, check_kind, download, resolve


def run_tokenizer(config: RunConfig, run_dir: Path, *, trained_on: Sequence[Record] = ()) -> ChatTokenizer:
    """Return the tokenizer of a run, which is stored in RUN/tokenizer. Collective.

    The first call creates the tokenizer. It is the configured one, that of the pretrained model, or a new one trained
    on the data.

    trained_on: the records of SFT, if they are loaded already; otherwise records are loaded when they are needed
    """
    tokenizer_dir = run_dir / "tokenizer"
    if distributed.is_rank_zero() and not (tokenizer_dir / "tokenizer_config.json").exists():
        tokenizer = make_tokenizer(config, trained_on)
        staging = run_dir / "tokenizer.tmp"
        shutil.rmtree(staging, ignore_errors=True)  # a killed start may have left files of another tokenizer
        tokenizer.save(staging)
        sync([*staging.iterdir(), staging])  # a disk that fails later must not leave an empty tokenizer
        staging.rename(tokenizer_dir)
    distributed.barrier()  # on every call: each rank waits until rank 0 has written the tokenizer
    return load_tokenizer(str(tokenizer_dir))


def make_tokenizer(config: RunConfig, trained_on: Sequence[Record]) -> ChatTokenizer:
    """Return the configured tokenizer, the tokenizer of the pretrained model, or one trained on records."""
    model = config.model
    if not model.trains_tokenizer:
        source = model.tokenizer
        if source is None:
            source = str(
                model_folder(model.path, "model.path") if model.path else download(str(model.hub), weights=False)
            )
        return load_tokenizer(source, chat_template=model.chat_template, thinking=model.thinking)
    size = int((model.architecture or {}).get("vocab_size", 1024))
    records = trained_on or next(
        (stage_records for stage in STAGES if (stage_records := _records_or_none(config, stage))), []
    )
    from pipeline.data.new_tokenizer import train_tokenizer  # imported here because few runs need a new tokenizer

    trained = train_tokenizer((text for record in records for text in _texts(record)), size)
    return with_template(trained.hf, chat_template=model.chat_template, thinking=model.thinking)


def _records_or_none(config: RunConfig, stage: str) -> Sequence[Record]:
    """Return the training records of a stage; an empty list if they cannot be loaded."""
    try:
        return load_stage(config.data, stage, config.seed, labels=not config.dpo.reads_pairs).train
    except UserError:
        return []


def _texts(record: Record) -> list[str]:
    """Return the texts of a record that the tokenizer is trained on."""
    if isinstance(record, Preference):
        return [message.text for message in (*record.prompt, record.chosen)]
    return [message.text for message in record.messages]


def actor_folder(config: RunConfig, run_dir: Path) -> Path:
    """Return the folder of the policy that later stages start from: `actor`, by default the SFT stage of the run."""
    return run_dir / "sft" if config.actor is None else Path(config.actor)


def policy_to_tune(config: RunConfig, folder: Path) -> tuple[ModelSource, ChatTokenizer]:
    """Return the language model that DPO or PPO starts from, and its tokenizer.

    `folder` is a stage's folder or a model folder. Raises UserError if it has a model of another kind, or if the
    embedding has too few rows.
    """
    source = resolve(config.model, config.seed, folder=folder)
    check_kind(source, wanted="ForCausalLM")
    tokenizer = actor_tokenizer(config, folder)
    check_vocabulary(source, tokenizer)
    return source, tokenizer


def actor_tokenizer(config: RunConfig, folder: Path) -> ChatTokenizer:
    """Return the tokenizer of the policy in `folder`, which its reward model shares.

    Raises UserError if its chat template is not that of `model.chat_template`, which only SFT applies.
    """
    tokenizer = load_tokenizer(str(model_folder(folder)), thinking=config.model.thinking)
    file, own = config.model.chat_template, str(tokenizer.hf.chat_template).removeprefix(THINKING)
    if file is not None and Path(file).read_text(encoding="utf-8").strip() != own.strip():
        raise UserError(
            f"model.chat_template={file} is not the chat template of the model in {folder}: run SFT with this template "
            "first (stage=sft, or stage=all), restore the file, or set model.chat_template=null"
        )
    return tokenizer


def check_vocabulary(source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if the tokenizer gives texts ids for which the model's embedding has no row.

    A control token that the template does not write needs no row: Gemma 3 1B has none for the token of images.
    """
    rows, hf = source.config.get_text_config().vocab_size, tokenizer.hf
    turns = [Message("user", "a"), Message("assistant", "a"), Message("user", "a")]
    written = {*tokenizer.encode_prompt(turns), *tokenizer.end_ids, tokenizer.pad_id, hf.bos_token_id}
    unused = {
        token
        for token, added in hf.added_tokens_decoder.items()
        if added.special and token not in written and added.content not in str(hf.chat_template)
    }
    if any(token >= rows and token not in unused for token in hf.get_vocab().values()):
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but model {source.name} has only {rows} embedding rows: "
            "set the model's own tokenizer (model.tokenizer=FOLDER). If tokens were added to the tokenizer, call "
            "resize_token_embeddings and save the model again"
        )


def adopt_special_ids(source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Set the special ids of a model with random weights to those of the tokenizer.

    The defaults of the family belong to another vocabulary. With these defaults, OPT would compute no gradient for the
    token with its default padding id, and config.json would contain wrong end tokens.
    """
    if source.folder is None:
        source.config.bos_token_id = tokenizer.hf.bos_token_id
        source.config.eos_token_id = tokenizer.end_id
        source.config.pad_token_id = tokenizer.model_pad_id


def require_context(config: RunConfig, stage: str, source: ModelSource) -> None:
    """Raise UserError if the model has too few positions for this stage or for a later stage that uses the model.

    The check prevents PPO from failing after a day of SFT.
    """
    has = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if has is None:  # the configuration has no limit
        return
    stages = stages_to_run(config)
    later_stages = stages[stages.index(stage) :] if stage in stages else [stage]
    if stage in ANSWERING:  # evaluation uses the lengths of PPO's rollouts; the reward model may be another model
        excluded = () if config.reward_model is None else ("reward",)
        later_stages = [name for name in dict.fromkeys((*later_stages, "ppo")) if name not in excluded]
    mistakes = [mistake for name in later_stages if (mistake := _too_long(config, name, has)) is not None]
    if mistakes:
        raise UserError(f"{source.name} has {has} positions for a sequence, too few for " + "; for ".join(mistakes))


def _too_long(config: RunConfig, stage: str, has: int) -> str | None:
    """Return advice on the lengths of a stage if they exceed `has` positions, else None."""
    if stage == "ppo":  # PPO generates its sequences
        prompt, answer = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
        advice = f"rollout.max_prompt_tokens={prompt} and rollout.max_new_tokens={answer}: {has} or less together"
        return advice if prompt + answer > has else None
    length = getattr(config, stage).max_length
    return f"{stage}.max_length={length}: set it to {has} or less" if length > has else None


def require_later_models(config: RunConfig, source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if a model of this run cannot serve a stage after the first one.

    `source` is the policy. The checks run before the first stage. They download the configuration and the tokenizer of
    a reward model on the hub, but not its weights.
    """
    stages = stages_to_run(config)
    if "reward" in stages:
        _require_reward_base(config, source, tokenizer)
    if "dpo" in stages:
        _require_adapters(config, "dpo", source)
    if "ppo" in stages:
        _require_models_of_ppo(config, source, tokenizer)


def _require_reward_base(config: RunConfig, source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if the reward stage cannot start from its model: `reward_model`, by default the policy."""
    if (model := config.reward_model) is not None:
        hub = model.hub if model.path is None and model.weights == "pretrained" else None
        source = resolve(model, config.seed, weights=hub is None)
        if hub is not None:
            source = replace(source, folder=download(hub, weights=False))
        check_vocabulary_of("reward_model", source, tokenizer)
        require_context(config, "reward", source)
    check_scores(source)
    _require_adapters(config, "reward", source)


def _require_models_of_ppo(config: RunConfig, source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if PPO cannot use a model that another run or the user trained, or a critic of the policy."""
    for folder in map(Path, filter(None, (config.reward_path, *config.ppo.reward_ensemble))):
        reward = load_reward(config, folder, tokenizer)
        check_scores(reward)
        require_context(config, "ppo", reward)
    if config.teacher is not None:
        require_context(config, "ppo", load_teacher(config, config.teacher, tokenizer))
    if not config.ppo.reward_model and config.ppo.advantage == "gae":
        check_scores(source)
    _require_adapters(config, "ppo", source)


def _require_adapters(config: RunConfig, stage: str, source: ModelSource) -> None:
    """Raise UserError if the LoRA targets of a stage match no module of its model."""
    lora = getattr(config, stage).lora
    if lora.rank and lora.targets != "all-linear":
        try:
            check_adapters(source, lora, scores=stage == "reward")
        except UserError as problem:
            raise UserError(f"{stage}.{problem}") from problem


def check_vocabulary_of(key: str, source: ModelSource, tokenizer: ChatTokenizer) -> None:
    """Raise UserError if the model that a key names has another vocabulary than the policy.

    The model reads the ids of the policy's tokenizer and chat template, so its own template has no effect.
    """
    if source.folder is not None and load_tokenizer(str(source.folder)).hf.get_vocab() != tokenizer.hf.get_vocab():
        raise UserError(
            f"{key}={source.name} has another tokenizer than the policy, so it would read other text than the policy "
            "writes: select a model with the vocabulary of the policy, or train the policy with the tokenizer of that "
            "model (model.tokenizer=FOLDER)"
        )


def load_teacher(config: RunConfig, teacher: str, tokenizer: ChatTokenizer) -> ModelSource:
    """Return the teacher of a distillation. Raises UserError for a model of another kind or vocabulary."""
    source = replace(resolve(config.model, config.seed, folder=Path(teacher)), name=teacher)
    check_kind(source, wanted="ForCausalLM")
    check_vocabulary_of("teacher", source, tokenizer)
    check_vocabulary(source, tokenizer)
    return source


def load_reward(config: RunConfig, folder: Path, tokenizer: ChatTokenizer) -> ModelSource:
    """Return a trained reward model. Raises UserError for a model of another kind or with another tokenizer."""
    source = resolve(config.reward_model or config.model, config.seed, folder=folder)
    check_kind(source, wanted="ForSequenceClassification")
    if load_tokenizer(str(source.folder)).fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"the reward model in {folder} has another tokenizer or chat template than the actor (model.thinking "
            "changes the template), so it would score other text than the actor writes; train it with the actor's "
            "tokenizer (stage=reward in the same run), or serve it and score with ppo.reward_function "
            "(examples/rewards/service.py)"
        )
    return source
