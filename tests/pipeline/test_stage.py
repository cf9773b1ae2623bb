"""What a stage does at its edge."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CohereConfig, LlamaConfig

from pipeline import stage, stage_data
from pipeline.config.schema import DataConfig, RolloutSection
from pipeline.data.encode import encode_conversations
from pipeline.data.load import StageRecords, load_stage
from pipeline.data.tokenizer import train_tokenizer
from pipeline.errors import UserError
from pipeline.models.source import ModelSource
from pipeline.stage import require_context, require_scorer, say_steps
from pipeline.stage_data import say_cut
from tests.pipeline.models.tiny import config_of, language_model
from tests.ranks import run_ranks
from tests.tiny import tiny_config

ROWS = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(30)]


def test_a_rank_that_finds_the_tokenizer_made_waits_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(stage.dist, "barrier", lambda: waits.append(1))
    monkeypatch.setattr(stage, "load_tokenizer", lambda folder, **_: folder)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").touch()
    assert stage.run_tokenizer(tiny_config(), tmp_path) == str(tmp_path / "tokenizer")  # type: ignore[comparison-overlap]
    assert waits == [1]  # else it is in another collective than the rank that made it


def test_a_tokenizer_is_trained_on_the_records_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As good as one that reads them itself: equal texts, equal order."""
    config = tiny_config()
    read = stage_data.stage_records(config, "sft").train
    itself = stage.run_tokenizer(config, _folder(tmp_path / "itself"))
    monkeypatch.setattr(stage, "load_stage", None)
    made = stage.run_tokenizer(config, _folder(tmp_path / "given"), trained_on=read)
    assert made.fingerprint() == itself.fingerprint()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_held_out_prompts_that_do_not_fit_are_told_before_any_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = train_tokenizer(["Question 1?"], 300)
    own = {"data": DataConfig(name="a", path=str(file))}
    config = tiny_config(rollout={"max_prompt_tokens": 3}).model_copy(update=own)
    with pytest.raises(UserError, match=r"none of the \d held-out prompts fits .*max_prompt_tokens=3, .*raise it"):
        stage_data.evaluation_prompts(config, tokenizer)
    assert stage_data.evaluation_prompts(config.model_copy(update={"stage": "sft"}), tokenizer) == []
    assert "max_prompt_tokens=3: none is answered" in capsys.readouterr().out


def test_what_was_cut_for_its_length_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say_cut("sft", {}, 9, "sft.max_length")
    assert capsys.readouterr().out == ""
    say_cut("sft", {"no answer within max_length": 1, "cut to max_length": 4}, 9, "sft.max_length")
    told = capsys.readouterr().out
    assert told == (
        "sft: too long, of 9: 4 x cut to max_length, 1 x no answer within max_length; sft.max_length sets the limit\n"
    )


def test_what_a_stage_will_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    section = tiny_config().sft.model_copy(update={"batch_size": 64, "steps": None, "epochs": 1.0})
    say_steps("sft", section, 1, 85)
    assert capsys.readouterr() == (
        "sft: 1 step of 64 conversations, 0.75 passes over 85\n",
        "warning: sft: 1 step will hardly teach anything: sft.epochs=16, or a smaller sft.batch_size\n",
    )
    say_steps("sft", section.model_copy(update={"steps": 2}), 2, 85)
    say_steps("ppo", section, 20, 1280)
    said = capsys.readouterr()
    assert said.out.endswith("ppo: 20 rollouts of 64 prompts, 1 passes over 1280\n") and said.err == ""


def test_data_that_a_later_stage_would_refuse_is_refused_by_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another file's ties, of which SFT reads nothing."""
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pairs.write_text("".join(json.dumps({"prompt": f"{n}?", "chosen": "a", "rejected": "a"}) + "\n" for n in range(9)))
    sources = [{"path": str(chats), "stages": ["sft", "ppo"]}, {"path": str(pairs), "stages": ["reward"]}]
    data = DataConfig.model_validate({"name": "x", "sources": sources})
    config = tiny_config().model_copy(update={"data": data})
    with pytest.raises(UserError, match="9 of 9 rows can't be used for reward: 9 x chosen equals rejected"):
        stage_data.check_data_to_come(config, "sft")
    assert capsys.readouterr().out.startswith("sft: reading the data of reward and ppo too")
    for nothing_bad_to_come in ({"stage": "sft"}, {"data": tiny_config().data}):
        stage_data.check_data_to_come(config.model_copy(update=nothing_bad_to_come), "sft")
    stage_data.check_data_to_come(config, "ppo")  # the reward stage is behind it
    assert capsys.readouterr().out == ""
    stage_data.check_data_to_come(config.model_copy(update={"reward_path": "elsewhere"}), "sft")
    assert capsys.readouterr().out.startswith("sft: reading the data of ppo too")


def test_lengths_that_a_later_stage_has_no_positions_for_are_told_by_the_first() -> None:
    source = ModelSource("short", LlamaConfig(max_position_embeddings=200), None, 1, "sdpa", False)
    long = {"reward": {"max_length": 201}, "rollout": {"max_prompt_tokens": 150, "max_new_tokens": 51}}
    with pytest.raises(UserError) as told:
        require_context(tiny_config(**long), "sft", source)
    assert str(told.value) == (
        "short has 200 positions for a sequence, too few for reward.max_length=201: set it to 200 or less; "
        "for rollout.max_prompt_tokens=150 and rollout.max_new_tokens=51: 200 or less together"
    )
    with pytest.raises(UserError, match=r"^short has 200 positions for a sequence, too few for rollout"):
        require_context(tiny_config(**long), "ppo", source)
    alone = tiny_config(**long).model_copy(update={"stage": "sft"})
    with pytest.raises(UserError, match=r"^short has 200 positions for a sequence, too few for rollout"):
        require_context(alone, "sft", source)  # it answers held-out prompts
    require_context(tiny_config(reward={"max_length": 200}), "sft", source)


def test_a_reward_model_of_another_size_has_positions_of_its_own() -> None:
    source = ModelSource("short", LlamaConfig(max_position_embeddings=200), None, 1, "sdpa", False)
    long = tiny_config(reward={"max_length": 201})
    apart = long.model_copy(update={"reward_model": long.model})
    require_context(apart, "sft", source)
    with pytest.raises(UserError, match=r"reward\.max_length=201"):
        require_context(apart, "reward", source)


def test_a_family_without_reward_models_is_refused_before_sft() -> None:
    source = ModelSource("c", CohereConfig(num_hidden_layers=1, hidden_size=32, vocab_size=96), None, 1, "sdpa", False)
    for changes in ({}, {"ppo": {"reward_model": False, "reward_function": "a.py:f"}}):
        with pytest.raises(UserError, match=r"c can be no reward model and no critic: .*cohere.*ppo=grpo"):
            require_scorer(tiny_config(**changes), source)
    without = {"reward_model": False, "reward_function": "a.py:f", "advantage": "rloo", "samples": 2}
    require_scorer(tiny_config(ppo=without), source)
    require_scorer(tiny_config().model_copy(update={"stage": "sft"}), source)
    other = tiny_config()
    require_scorer(other.model_copy(update={"reward_model": other.model}), source)


def on_every_rank(file: str) -> dict[str, Any]:
    """What a rank gets of the data, and how often it read any."""
    read: list[str] = []

    def counted(data: DataConfig, which: str, seed: int, **keys: Any) -> StageRecords:
        read.append(which)
        return load_stage(data, which, seed, **keys)

    stage_data.load_stage = counted
    config = tiny_config().model_copy(update={"data": DataConfig(name="a", path=file)})
    tokenizer = train_tokenizer(["Question 1?"], 300)
    records = stage_data.stage_records(config, "sft")
    items, notes = stage_data.by_first_rank(lambda: encode_conversations(tokenizer, records.train, max_length=17))
    short = config.model_copy(update={"rollout": RolloutSection(max_prompt_tokens=3)})
    with pytest.raises(UserError, match="held-out prompts fits") as refused:
        stage_data.evaluation_prompts(short, tokenizer)
    return {
        "read": read,
        "records": len(records.train),
        "skipped": records.skipped,
        "items": [(item.ids.tolist(), item.counts.tolist()) for item in items],
        "notes": dict(notes),
        "prompts": stage_data.evaluation_prompts(config, tokenizer),
        "refused": str(refused.value),
    }


def test_the_first_rank_reads_and_encodes_for_all(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [*ROWS, {"prompt": "Question?", "completion": ""}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = run_ranks(on_every_rank, 2, str(file))
    assert (first.pop("read"), second.pop("read")) == (["sft", "ppo", "ppo"], [])
    assert first.pop("records") == len(first["items"]) > 5 and second.pop("records") == 0
    assert first == second and first["notes"]["cut to max_length"] > 0 and first["skipped"]["empty answer"] == 1


def test_a_policy_whose_tokenizer_has_more_ids_than_it_has_rows_is_refused(tmp_path: Path) -> None:
    """DPO and PPO start from any folder; an id without a row would end the stage in the middle, or read another's."""
    language_model(config_of("llama")).save_pretrained(tmp_path)
    train_tokenizer([f"Question {n}? Answer {n}." for n in range(300)], 400).hf.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ ids, model .* only \d+ embedding rows; give"):
        stage.policy_to_tune(tiny_config(), tmp_path)
