from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig

from pipeline.config.stage_sections import DpoSection, LoraConfig, PpoSection, RewardSection
from pipeline.data.tokenizer import load_tokenizer, train_tokenizer
from pipeline.errors import UserError
from pipeline.models import stage_models
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import (
    check_base_tokenizer,
    check_teacher_tokenizer,
    policy_to_tune,
    require_adapters,
    require_context,
    require_given_models,
    require_scorer,
    require_tokenizer,
    run_tokenizer,
)
from pipeline.stages.data import stage_records
from tests.pipeline.models.tiny import classifier, config_of, language_model
from tests.tiny import tiny_config


def test_all_ranks_wait_for_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(stage_models.distributed, "barrier", lambda: waits.append(1))
    monkeypatch.setattr(stage_models, "load_tokenizer", lambda folder, **_: folder)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").touch()
    assert run_tokenizer(tiny_config(), tmp_path) == str(tmp_path / "tokenizer")  # type: ignore[comparison-overlap]
    assert waits == [1]  # otherwise it would be in another collective than the rank that trains the tokenizer


def test_a_tokenizer_is_trained_on_the_given_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result equals a tokenizer that reads the records itself: equal texts in equal order."""
    config = tiny_config()
    read = stage_records(config, "sft").train
    itself = run_tokenizer(config, _folder(tmp_path / "itself"))
    monkeypatch.setattr(stage_models, "load_stage", None)
    made = run_tokenizer(config, _folder(tmp_path / "given"), trained_on=read)
    assert made.fingerprint() == itself.fingerprint()


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


def test_a_family_without_reward_models_is_refused_before_sft() -> None:
    source = ModelSource(
        "b", BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4), None, 1, "sdpa", False
    )
    for changes in ({}, {"ppo": {"reward_model": False, "reward_function": "a.py:f"}}):
        with pytest.raises(UserError, match=r"no linear head named score\. .*ppo=grpo"):
            require_scorer(tiny_config(**changes), source)
    without = {"reward_model": False, "reward_function": "a.py:f", "advantage": "rloo", "samples": 2}
    require_scorer(tiny_config(ppo=without), source)
    require_scorer(tiny_config().model_copy(update={"stage": "sft"}), source)
    other = tiny_config()
    require_scorer(other.model_copy(update={"reward_model": other.model}), source)


def test_a_reward_model_that_cannot_be_split_is_refused_before_sft(tmp_path: Path) -> None:
    config = tiny_config(engine={"tensor_parallel": 2})
    source, gpt2 = resolve(config.model, 1), {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
    other = config.model_copy(update={"reward_model": config.model.model_copy(update={"architecture": gpt2})})
    with pytest.raises(UserError, match=r"GPT2.* without a tensor-parallel plan .*Set reward_model\.tensor_plan to"):
        require_scorer(other, source)
    require_scorer(config.model_copy(update={"reward_model": config.model}), source)
    classifier(config_of("gpt2")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"GPT2.* without a tensor-parallel plan"):
        require_given_models(config.model_copy(update={"reward_path": str(tmp_path)}))


def test_given_models_of_another_kind_are_refused_before_sft(tmp_path: Path) -> None:
    long = config_of("llama", max_position_embeddings=256)
    language_model(long).save_pretrained(tmp_path / "sft")
    classifier(long).save_pretrained(tmp_path / "reward")
    classifier(long, labels=3).save_pretrained(tmp_path / "three")
    sft, reward, three = (str(tmp_path / name) for name in ("sft", "reward", "three"))
    config = tiny_config()
    for changes, reason in (
        ({"reward_path": sft}, "sft has a LlamaForCausalLM, not a reward model"),
        ({"ppo": PpoSection(reward_ensemble=[sft])}, "sft has a LlamaForCausalLM, not a reward model"),
        ({"reward_path": three}, "three has a classifier with 3 labels, but a reward model has one score"),
        ({"teacher": reward}, "reward has a LlamaForSequenceClassification, not a language model"),
    ):
        given = config.model_copy(update=changes)
        with pytest.raises(UserError, match=reason):
            require_given_models(given)
        require_given_models(given.model_copy(update={"stage": "sft"}))
    require_given_models(config.model_copy(update={"reward_path": reward, "teacher": sft}))


def test_other_models_with_few_positions_are_refused_before_sft(tmp_path: Path) -> None:
    few = config_of("llama", max_position_embeddings=256)
    language_model(few).save_pretrained(tmp_path / "sft")
    classifier(few).save_pretrained(tmp_path / "reward")
    sft, reward = str(tmp_path / "sft"), str(tmp_path / "reward")
    config = tiny_config()
    long = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_new_tokens": 256})})
    for changes in ({"reward_path": reward}, {"ppo": PpoSection(reward_ensemble=[reward])}, {"teacher": sft}):
        require_given_models(config.model_copy(update=changes))
        with pytest.raises(UserError, match=r"has 256 positions .* rollout\.max_new_tokens=256"):
            require_given_models(long.model_copy(update=changes))
    short = config.model.model_copy(update={"architecture": few.to_dict()})
    with pytest.raises(UserError, match=r"has 256 positions .* rollout\.max_new_tokens=256"):
        require_scorer(long.model_copy(update={"reward_model": short}), resolve(config.model, 1))


def test_models_with_another_tokenizer_are_refused_before_sft(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    train_tokenizer(["aa ab"], 300).save(tmp_path)
    policy, other = load_tokenizer(str(tmp_path)), train_tokenizer(["ba bb"], 300)
    config, folder = tiny_config(), str(tmp_path)
    base = config.model.model_copy(update={"weights": "pretrained", "path": folder, "architecture": None})
    for changes, reason in (
        ({"reward_model": base}, "reward_model=.* has another tokenizer than the policy"),
        ({"reward_path": folder}, "the reward model in .* has another tokenizer or chat template than the actor"),
        ({"ppo": PpoSection(reward_ensemble=[folder])}, "the reward model in .* has another tokenizer"),
        ({"teacher": folder}, "teacher=.* has another tokenizer than the student"),
    ):
        given = config.model_copy(update=changes)
        require_tokenizer(given, policy)
        require_tokenizer(given.model_copy(update={"stage": "sft"}), other)
        with pytest.raises(UserError, match=reason):
            require_tokenizer(given, other)


def test_the_base_of_a_reward_model_and_a_teacher_may_have_another_chat_template(tmp_path: Path) -> None:
    language_model(config_of("llama")).save_pretrained(tmp_path)
    train_tokenizer(["aa ab"], 300).save(tmp_path)
    template = "{% for m in messages %}{{ m.role }}={{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "policy.jinja").write_text(template)
    policy = load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "policy.jinja"))
    base = ModelSource("b", config_of("llama"), tmp_path, 1, "sdpa", False)
    check_teacher_tokenizer(str(tmp_path), policy)
    assert policy.fingerprint() != load_tokenizer(str(tmp_path)).fingerprint()
    check_base_tokenizer(base, policy)


def test_a_tokenizer_with_more_ids_than_embedding_rows_is_refused(tmp_path: Path) -> None:
    """DPO and PPO start from any folder. An id without a row would raise an error in the middle of the stage."""
    language_model(config_of("llama")).save_pretrained(tmp_path)
    train_tokenizer([f"Question {n}? Answer {n}." for n in range(300)], 400).hf.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ ids, but model .* only \d+ embedding rows: set"):
        policy_to_tune(tiny_config(), tmp_path)


def test_adapter_targets_of_later_stages_are_checked_before_sft() -> None:
    source, other = (ModelSource("b", config_of(family), None, 1, "sdpa", False) for family in ("gpt2", "llama"))
    lora = LoraConfig(rank=2, targets=["q_proj"])
    config = tiny_config()
    for changes in (
        {"method": "dpo", "dpo": DpoSection(lora=lora)},
        {"reward": RewardSection(lora=lora)},
        {"ppo": PpoSection(lora=lora)},
    ):
        adapted = config.model_copy(update=changes)
        with pytest.raises(UserError, match=r"^(dpo|reward|ppo)\.lora\.targets=\['q_proj'\] matches no .*c_attn"):
            require_adapters(adapted, source)
        require_adapters(adapted, other)
        require_adapters(adapted.model_copy(update={"stage": "sft"}), source)
    # The reward model is a Llama.
    rewarding = config.model_copy(update={"reward": RewardSection(lora=lora), "reward_model": config.model})
    require_adapters(rewarding, source)
