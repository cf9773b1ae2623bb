from functools import partial
from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig

from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import DpoSection, LoraConfig, PpoSection, RewardSection
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from pipeline.models import stage_models
from pipeline.models.source import ModelSource
from pipeline.models.stage_models import (
    actor_tokenizer,
    check_vocabulary,
    check_vocabulary_of,
    load_teacher,
    policy_to_tune,
    require_context,
    require_later_models,
    run_tokenizer,
)
from pipeline.stages.data import open_data, stage_records
from step2_reward.train import starting_point
from tests.pipeline.data.templates import REASONING
from tests.pipeline.models.tiny import classifier, config_of, language_model
from tests.tiny import tiny_config


def test_a_tokenizer_is_trained_on_the_given_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result equals a tokenizer that reads the records itself: equal texts in equal order."""
    config = tiny_config()
    read = stage_records(config, "sft", open_data(config)).train
    itself = run_tokenizer(config, _folder(tmp_path / "itself"))
    monkeypatch.setattr(stage_models, "load_stage", None)
    made = run_tokenizer(config, _folder(tmp_path / "given"), trained_on=read)
    assert made.fingerprint() == itself.fingerprint()


def test_a_trained_tokenizer_has_the_given_template(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}")
    made = run_tokenizer(tiny_config(model={"chat_template": str(template)}), _folder(tmp_path / "run"))
    assert made.hf.chat_template == template.read_text()
    with pytest.raises(UserError, match=r"model\.thinking=true: The chat template does not write the reasoning"):
        run_tokenizer(tiny_config(model={"thinking": True}), _folder(tmp_path / "thinks"))


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_first_stage_refuses_lengths_beyond_the_positions_of_later_stages() -> None:
    source = ModelSource("short", LlamaConfig(max_position_embeddings=200), None, 1, "sdpa", False)
    long = {"reward": {"max_length": 201}, "rollout": {"max_prompt_tokens": 150, "max_new_tokens": 51}}
    with pytest.raises(UserError) as error:
        require_context(tiny_config(**long), "sft", source)
    assert str(error.value) == (
        "short has 200 positions for a sequence, too few for reward.max_length=201: set it to 200 or less; "
        "for rollout.max_prompt_tokens=150 and rollout.max_new_tokens=51: 200 or less together"
    )
    with pytest.raises(UserError, match=r"^short has 200 positions for a sequence, too few for rollout"):
        require_context(tiny_config(**long), "ppo", source)
    single = tiny_config(**long).model_copy(update={"stage": "sft"})
    with pytest.raises(UserError, match=r"^short has 200 positions for a sequence, too few for rollout"):
        require_context(single, "sft", source)  # the stage answers held-out prompts
    require_context(tiny_config(reward={"max_length": 200}), "sft", source)


def test_a_separate_reward_model_has_its_own_positions() -> None:
    source = ModelSource("short", LlamaConfig(max_position_embeddings=200), None, 1, "sdpa", False)
    long = tiny_config(reward={"max_length": 201})
    separate = long.model_copy(update={"reward_model": long.model})
    require_context(separate, "sft", source)
    with pytest.raises(UserError, match=r"reward\.max_length=201"):
        require_context(separate, "reward", source)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, a reward model and a classifier with three labels, each with 256 positions."""
    folder = tmp_path_factory.mktemp("given")
    for name, make in (("sft", language_model), ("reward", classifier), ("three", partial(classifier, labels=3))):
        make(config_of("llama", vocab_size=300, max_position_embeddings=256)).save_pretrained(folder / name)
        train_tokenizer(["aa ab"], 300).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def tokenizer(given: Path) -> ChatTokenizer:
    return load_tokenizer(str(given / "sft"))


def llama() -> ModelSource:
    return ModelSource("b", config_of("llama"), None, 1, "sdpa", False)


def naming(key: str, folder: Path) -> RunConfig:
    """Return a configuration whose key, or ensemble, names a folder."""
    config, value = tiny_config(), str(folder)
    base = config.model.model_copy(update={"weights": "pretrained", "path": value, "architecture": None})
    others = {"reward_model": {"reward_model": base}, "ensemble": {"ppo": PpoSection(reward_ensemble=[value])}}
    return config.model_copy(update=others.get(key, {key: value}))


def only_sft(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"stage": "sft"})


def test_a_family_without_reward_models_is_refused_before_sft(tokenizer: ChatTokenizer) -> None:
    bert = BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    source = ModelSource("b", bert, None, 1, "sdpa", False)
    for changes in ({}, {"ppo": {"reward_model": False, "reward_function": "a.py:f"}}):
        with pytest.raises(UserError, match=r"no linear head named score\. .*ppo=grpo"):
            require_later_models(tiny_config(**changes), source, tokenizer)
    without = {"reward_model": False, "reward_function": "a.py:f", "advantage": "rloo", "samples": 2}
    other = tiny_config()
    separate = other.model_copy(update={"reward_model": other.model})
    for config in (tiny_config(ppo=without), only_sft(other), separate):
        require_later_models(config, source, tokenizer)


@pytest.mark.parametrize(
    ("key", "name", "reason"),
    [
        ("reward_path", "sft", "sft has a LlamaForCausalLM, not a reward model"),
        ("ensemble", "sft", "sft has a LlamaForCausalLM, not a reward model"),
        ("reward_path", "three", "three has a classifier with 3 labels, but a reward model has one score"),
        ("teacher", "reward", "reward has a LlamaForSequenceClassification, not a language model"),
    ],
)
def test_given_models_of_another_kind_are_refused_before_sft(
    key: str, name: str, reason: str, given: Path, tokenizer: ChatTokenizer
) -> None:
    config = naming(key, given / name)
    with pytest.raises(UserError, match=reason):
        require_later_models(config, llama(), tokenizer)
    require_later_models(only_sft(config), llama(), tokenizer)


@pytest.mark.parametrize(
    ("key", "name", "other_tokenizer"),
    [
        ("reward_model", "sft", "reward_model=.* has another tokenizer than the policy"),
        ("reward_path", "reward", "the reward model in .* has another tokenizer or chat template than the actor"),
        ("ensemble", "reward", "the reward model in .* has another tokenizer"),
        ("teacher", "sft", "teacher=.* has another tokenizer than the policy"),
    ],
)
def test_given_models_with_few_positions_or_another_tokenizer_are_refused_before_sft(
    key: str, name: str, other_tokenizer: str, given: Path, tokenizer: ChatTokenizer
) -> None:
    config = naming(key, given / name)
    require_later_models(config, llama(), tokenizer)
    long = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_new_tokens": 256})})
    with pytest.raises(UserError, match=r"has 256 positions .* rollout\.max_new_tokens=256"):
        require_later_models(long, llama(), tokenizer)
    with pytest.raises(UserError, match=other_tokenizer):
        require_later_models(config, llama(), train_tokenizer(["ba bb"], 300))


def test_a_reward_model_on_the_hub_is_checked_before_sft(
    given: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = naming("reward_model", given / "sft")
    assert config.reward_model is not None
    on_hub = config.reward_model.model_copy(update={"path": None, "hub": "me/reward"})
    config = config.model_copy(update={"reward_model": on_hub})

    def download(hub: str, *, weights: bool = True) -> Path:
        assert hub == "me/reward" and not weights
        return given / "sft"

    for module in ("source", "stage_models"):
        monkeypatch.setattr(f"pipeline.models.{module}.download", download)
    require_later_models(config, llama(), tokenizer)
    with pytest.raises(UserError, match=r"reward_model=.* has another tokenizer than the policy"):
        require_later_models(config, llama(), train_tokenizer(["ba bb"], 300))


def test_the_base_of_a_reward_model_and_a_teacher_may_have_another_chat_template(
    given: Path, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    template = "{% for m in messages %}{{ m.role }}={{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "policy.jinja").write_text(template)
    policy = load_tokenizer(str(given / "sft"), chat_template=str(tmp_path / "policy.jinja"))
    assert policy.fingerprint() != tokenizer.fingerprint()
    source = ModelSource("b", config_of("llama"), given / "sft", 1, "sdpa", False)
    check_vocabulary_of("reward_model", source, policy)
    load_teacher(tiny_config(), str(given / "sft"), policy)


def test_the_policy_and_its_reward_model_have_one_template_that_sft_has_set(given: Path, tmp_path: Path) -> None:
    """`model.thinking` changes the template of a given policy. `model.chat_template` has no effect after SFT."""
    (tmp_path / "mine.jinja").write_text(REASONING)
    trained = load_tokenizer(str(given / "sft"), chat_template=str(tmp_path / "mine.jinja"))
    language_model(config_of("llama")).save_pretrained(tmp_path / "actor")
    trained.save(tmp_path / "actor")
    for thinking in (False, True):
        config = tiny_config(model={"chat_template": str(tmp_path / "mine.jinja"), "thinking": thinking})
        config = config.model_copy(update={"actor": str(tmp_path / "actor"), "reward": RewardSection(init="base")})
        own = actor_tokenizer(config, tmp_path / "actor")
        assert (own.fingerprint() == trained.fingerprint()) != thinking
        assert starting_point(config, tmp_path)[1].fingerprint() == own.fingerprint()
    with pytest.raises(UserError, match=r"mine.jinja is not the chat template of the model in .*sft: run SFT with"):
        actor_tokenizer(tiny_config(model={"chat_template": str(tmp_path / "mine.jinja")}), given / "sft")


def test_a_tokenizer_with_more_ids_than_embedding_rows_is_refused(tmp_path: Path) -> None:
    """DPO and PPO start from any folder. An id without a row would raise an error in the middle of the stage."""
    language_model(config_of("llama")).save_pretrained(tmp_path)
    train_tokenizer([f"Question {n}? Answer {n}." for n in range(300)], 400).hf.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ ids, but model .* only \d+ embedding rows: set"):
        policy_to_tune(tiny_config(), tmp_path)


@pytest.mark.parametrize("change", ["none", "template", "padding", "a word"])
def test_a_control_token_that_no_text_has_needs_no_embedding_row(change: str) -> None:
    """Gemma 3 1B has 262,144 rows, and its tokenizer gives the token of images the id 262,144."""
    made = train_tokenizer([f"Question {n}? Answer {n}." for n in range(300)], 400)
    source = ModelSource("b", config_of("llama", vocab_size=made.vocab_size), None, 1, "sdpa", False)
    made.hf.add_tokens(["<image>"], special_tokens=change != "a word")
    if change == "template":
        made.hf.chat_template = "{% if tools %}<image>{% endif %}" + str(made.hf.chat_template)
    elif change == "padding":
        made.hf.pad_token = "<image>"
    own = ChatTokenizer(made.hf)
    if change == "none":
        check_vocabulary(source, own)
        answer = own.encode_prompt([Message("user", "<image>?")]) + own.encode_answer("<image>")
        assert max(answer) < made.vocab_size < own.vocab_size
        return
    with pytest.raises(UserError, match=rf"the tokenizer has {own.vocab_size} ids, but model b has only"):
        check_vocabulary(source, own)


def test_adapter_targets_of_later_stages_are_checked_before_sft(tokenizer: ChatTokenizer) -> None:
    source = ModelSource("b", config_of("gpt2"), None, 1, "sdpa", False)
    lora = LoraConfig(rank=2, targets=["q_proj"])
    config = tiny_config()
    for changes in (
        {"method": "dpo", "dpo": DpoSection(lora=lora)},
        {"reward": RewardSection(lora=lora)},
        {"ppo": PpoSection(lora=lora)},
    ):
        adapted = config.model_copy(update=changes)
        with pytest.raises(UserError, match=r"^(dpo|reward|ppo)\.lora\.targets=\['q_proj'\] matches no .*c_attn"):
            require_later_models(adapted, source, tokenizer)
        require_later_models(adapted, llama(), tokenizer)
        require_later_models(only_sft(adapted), source, tokenizer)
    # The reward model is a Llama.
    section = RewardSection(lora=lora, max_length=160)
    rewarding = config.model_copy(update={"reward": section, "reward_model": config.model})
    require_later_models(rewarding, source, tokenizer)
