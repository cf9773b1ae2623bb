"""Stages get disjoint records from every kind of source. No prompt is both trained and held out."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.schema import DataConfig, SourceConfig
from pipeline.data.load import DataReader, held_out_point, load_stage
from pipeline.data.records import Conversation, Document, LabelledAnswer, Message, Preference, Prompt
from pipeline.data.sources import digest, first_turn
from pipeline.errors import UserError
from pipeline.installation import ROOT

STAGES = ("sft", "reward", "ppo")
CONF = ROOT / "conf" / "data"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(numbers: range) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in numbers]


def chats(numbers: range) -> list[dict[str, Any]]:
    return [{"question": f"question {i}", "answer": f"answer {i}"} for i in numbers]


def of(*sources: dict[str, Any], **keys: Any) -> DataConfig:
    return DataConfig(name="test", sources=[SourceConfig(**source) for source in sources], **keys)


def prompts(records: list[Any]) -> set[bytes]:
    return {digest(record) for record in records}


def test_one_file_gives_all_stages_disjoint_prompts(tmp_path: Path) -> None:
    data = DataConfig(name="x", path=write(tmp_path / "p.jsonl", pairs(range(400)) * 2), eval_fraction=0.1)
    loaded = {stage: load_stage(data, stage, seed=1) for stage in STAGES}
    kinds = {"sft": Conversation, "reward": Preference, "ppo": Prompt}
    for stage, records in loaded.items():
        assert all(type(record) is kinds[stage] for record in records.train + records.held_out)
    train = {stage: prompts(records.train) for stage, records in loaded.items()}
    held_out = prompts(loaded["sft"].held_out)
    assert all(prompts(records.held_out) == held_out for records in loaded.values())
    assert len(held_out) == pytest.approx(40, abs=18)
    assert sum(len(part) for part in train.values()) + len(held_out) == 400
    assert len(train["reward"]) == pytest.approx(2 * len(train["sft"]), rel=0.3)
    assert len(loaded["reward"].train) == 2 * len(train["reward"])  # equal pairs are not merged
    assert len(loaded["ppo"].train) == len(train["ppo"])  # equal prompts are merged
    assert loaded["ppo"].skipped["repeats another row"] == 400
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"):
        write(folder / name, pairs(range(400)))
    shards = DataConfig(name="x", path=str(folder), eval_fraction=0.1)
    for stage, records in loaded.items():  # as in one file
        assert len(load_stage(shards, stage, seed=1).train) == len(records.train)
    dpo = load_stage(data, "dpo", seed=1)  # DPO replaces the reward model and PPO
    assert prompts(dpo.train) == train["reward"] | train["ppo"] and prompts(dpo.held_out) == held_out
    assert type(dpo.train[0]) is Preference and len(dpo.train) == 2 * len(prompts(dpo.train))


def test_splits_depend_only_on_the_text(tmp_path: Path) -> None:
    one = DataConfig(name="x", path=write(tmp_path / "a.jsonl", pairs(range(300))))
    other = DataConfig(name="x", path=write(tmp_path / "b.jsonl", pairs(range(299, -1, -1))))
    first, second = load_stage(one, "sft", seed=1), load_stage(other, "sft", seed=7)
    assert prompts(first.train) == prompts(second.train)
    assert prompts(first.held_out) == prompts(second.held_out)
    assert [digest(r) for r in first.held_out] == [digest(r) for r in second.held_out]


def threads(count: int) -> list[dict[str, Any]]:
    """Return conversations of one to four questions: one row for each length, with other letter cases in short rows."""
    rows = []
    for thread in range(count):
        turns = [
            Message(role, f"{text} {thread}, turn {turn}")
            for turn in range(1 + thread % 4)
            for role, text in (("user", "Question"), ("assistant", "Answer"))
        ]
        for end in range(2, len(turns) + 1, 2):
            texts = [turn.content.upper() if end < len(turns) else turn.content for turn in turns[:end]]
            messages = zip(turns, texts, strict=False)
            rows.append({"messages": [{"role": turn.role, "content": text} for turn, text in messages]})
    return rows


def test_conversations_with_the_same_first_turn_are_in_one_split(tmp_path: Path) -> None:
    data = DataConfig(name="x", path=write(tmp_path / "c.jsonl", threads(200)), eval_fraction=0.1)
    loaded = {stage: load_stage(data, stage, seed=1) for stage in ("sft", "ppo")}
    turns = {stage: {first_turn(record) for record in records.train} for stage, records in loaded.items()}
    held_out = {first_turn(record) for record in loaded["ppo"].held_out}
    assert held_out == {first_turn(record) for record in loaded["sft"].held_out}
    assert len(held_out) == pytest.approx(20, abs=12) and len(loaded["ppo"].held_out) > 1.5 * len(held_out)
    assert not held_out & (turns["sft"] | turns["ppo"]) and not turns["sft"] & turns["ppo"]
    assert len(turns["sft"] | turns["ppo"] | held_out) == 200
    trained = {
        tuple(message.content.lower() for message in record.messages[:end])
        for record in loaded["sft"].train
        for end in range(1, len(record.messages), 2)
    }
    prompted = {tuple(message.content.lower() for message in prompt.messages) for prompt in loaded["ppo"].held_out}
    assert not prompted & trained  # SFT trains on every answer of a conversation, not only on the last one


def test_a_thread_of_a_test_file_is_held_out_of_the_training_file(tmp_path: Path) -> None:
    rows = threads(40)
    test = write(tmp_path / "test.jsonl", [row for row in rows if len(row["messages"]) == 2][:20])
    data = of({"path": write(tmp_path / "train.jsonl", rows), "eval_path": test, "stages": ["sft"]})
    records = load_stage(data, "sft", seed=1)
    assert not {first_turn(record) for record in records.train} & {first_turn(record) for record in records.held_out}
    assert len({first_turn(record) for record in records.train}) == 20
    assert records.skipped == {"prompt is held out": len(rows) - len(records.train)}


def test_rows_of_a_single_stage_are_not_divided(tmp_path: Path) -> None:
    data = DataConfig(name="x", path=write(tmp_path / "q.jsonl", [{"prompt": f"q {i}"} for i in range(200)]))
    records = load_stage(data, "ppo", seed=1)
    assert len(records.train) + len(records.held_out) == 200
    data = of({"path": data.path, "stages": ["ppo", "reward", "sft"]})
    assert len(load_stage(data, "ppo", seed=1).train) == len(records.train)


def test_a_held_out_prompt_is_held_out_of_every_source_and_stage(tmp_path: Path) -> None:
    questions = write(tmp_path / "train.jsonl", chats(range(400)))
    test = write(tmp_path / "test.jsonl", chats(range(350, 450)))
    preferences = write(tmp_path / "pairs.jsonl", pairs(range(200, 500)))
    data = of(
        {"path": questions, "eval_path": test, "stages": ["sft", "ppo"]},
        {"path": preferences, "stages": ["reward"]},
        stage_shares={"sft": 1, "ppo": 1},
    )
    loaded = {stage: load_stage(data, stage, seed=1) for stage in STAGES}
    held_out = set().union(*(prompts(records.held_out) for records in loaded.values()))
    for records in loaded.values():
        assert not prompts(records.train) & held_out
    assert prompts(loaded["sft"].held_out) == prompts(loaded["ppo"].held_out)
    assert len(loaded["sft"].held_out) == 100
    about_test = {key for key in prompts(loaded["reward"].held_out) if key in prompts(loaded["sft"].held_out)}
    assert len(about_test) == 100  # pairs about questions of the test file are held out
    assert loaded["sft"].skipped["prompt is held out"] >= 50


def test_without_a_hash_split_only_the_held_out_file_is_held_out(tmp_path: Path) -> None:
    data = of({"path": write(tmp_path / "a.jsonl", chats(range(100))), "stages": ["sft"],
               "eval_path": write(tmp_path / "b.jsonl", chats(range(90, 120)))})  # fmt: skip
    records = load_stage(data, "sft", seed=1)
    assert (len(records.train), len(records.held_out)) == (90, 30)
    assert records.skipped == {"prompt is held out": 10}


def test_held_out_prompts_are_unique(tmp_path: Path) -> None:
    test = write(tmp_path / "b.jsonl", chats(range(10)) * 2)
    data = of({"path": write(tmp_path / "a.jsonl", chats(range(10, 50))), "eval_path": test, "stages": ["sft", "ppo"]})
    assert len(load_stage(data, "ppo", seed=1).held_out) == 10
    assert len(load_stage(data, "sft", seed=1).held_out) == 20


def test_the_held_out_prompt_of_a_tiny_file_is_removed_from_other_sources(tmp_path: Path) -> None:
    rows = [row for row in chats(range(1000)) if held_out_point(digest_of_question(row)) > 0.5]
    tiny, large = (
        write(tmp_path / "a.jsonl", rows[:8]),
        write(tmp_path / "b.jsonl", rows[:100] + chats(range(2000, 2100))),
    )
    sources = [{"path": tiny, "stages": ["sft"]}, {"path": large, "stages": ["sft"], "weight": 100}]
    records = load_stage(of(*sources), "sft", seed=1)
    assert any(record.source == "a" for record in records.held_out)
    assert not prompts(records.train) & prompts(records.held_out)


@pytest.mark.parametrize("evaluated", ["ppo", "sft"])
def test_the_evaluation_prompt_of_a_tiny_file_is_trained_by_no_stage(evaluated: str, tmp_path: Path) -> None:
    rows = [row for row in chats(range(50)) if held_out_point(digest_of_question(row)) > 0.5][:8]
    tiny, large = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", pairs(range(50)))
    others = ["sft", "reward"] if evaluated == "ppo" else ["reward"]
    data = of({"path": tiny, "stages": [evaluated]}, {"path": large, "stages": others})
    held_out = prompts(DataReader(data, seed=1).held_out())
    for stage in others:
        assert held_out and not held_out & prompts(load_stage(data, stage, seed=1).train)


def test_a_tiny_file_holds_out_one_prompt(tmp_path: Path) -> None:
    rows = [row for row in chats(range(1000)) if held_out_point(digest_of_question(row)) > 0.5][:8]
    data = of({"path": write(tmp_path / "a.jsonl", rows), "stages": ["sft"]})
    records = load_stage(data, "sft", seed=1)
    assert (len(records.train), len(records.held_out)) == (7, 1)
    assert records.held_out == [min(records.train + records.held_out, key=lambda r: held_out_point(digest(r)))]
    for same in (rows[:1], [{"text": "a long document"}] * 2):
        with pytest.raises(UserError, match=r"left for stage sft: \d are held out \(rows with the same first"):
            load_stage(of({"path": write(tmp_path / "b.jsonl", same), "stages": ["sft"]}), "sft", seed=1)


def digest_of_question(row: dict[str, Any]) -> bytes:
    return digest(Prompt((Message("user", row["question"]),), "test"))


def test_sources_are_mixed_by_weight_and_seed(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", chats(range(400))), write(tmp_path / "b.jsonl", chats(range(1000, 1100)))]
    sources = [{"path": path, "stages": ["sft"], "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)]
    records = load_stage(of(*sources), "sft", seed=1)
    counts = {name: sum(record.source == name for record in records.train) for name in ("a", "b")}
    assert counts["b"] > 85 and counts["a"] == 3 * counts["b"]
    assert load_stage(of(*sources), "sft", seed=1) == records
    other = load_stage(of(*sources), "sft", seed=2)
    assert other.train != records.train and other.held_out == records.held_out


def test_a_folder_of_several_formats_gives_each_stage_its_rows(tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", chats(range(100)))
    write(tmp_path / "pairs.jsonl", pairs(range(100, 200)))
    data = DataConfig(name="x", path=str(tmp_path), stage_shares={"sft": 1, "reward": 1, "ppo": 1})
    records = load_stage(data, "reward", seed=1)
    assert 0 < len(records.train) < 100
    assert all(isinstance(record, Preference) for record in records.train)


def test_data_without_rows_for_the_stage_is_refused(tmp_path: Path) -> None:
    data = DataConfig(name="x", path=write(tmp_path / "chats.jsonl", chats(range(100))))
    output = (
        r"reward needs prompt \+ chosen.*chats\.jsonl \(columns answer, question\) has completions, for sft, ppo\..*"
        r"ppo\.reward_model=false.*rename"
    )
    with pytest.raises(UserError, match=output):
        load_stage(data, "reward", seed=1)
    with pytest.raises(UserError, match="no source lists the stage"):
        load_stage(of({"path": data.path, "stages": ["sft"]}), "ppo", seed=1)
    for shares in ({"sft": 1}, {"reward": 1}):
        with pytest.raises(UserError, match=r"no usable row is left for stage ppo.* data\.stage_shares"):
            load_stage(DataConfig(name="x", path=data.path, stage_shares=shares), "ppo", seed=1)


def test_a_missing_source_is_ignored_by_stages_that_do_not_read_it(tmp_path: Path) -> None:
    message = {"path": write(tmp_path / "a.jsonl", chats(range(50))), "stages": ["sft"]}
    data = of(message, {"path": str(tmp_path / "absent.jsonl"), "stages": ["reward"]})
    assert load_stage(data, "sft", seed=1) == load_stage(of(message), "sft", seed=1)
    with pytest.raises(UserError, match=r"data\.sources\.1\.path=.*no such file"):
        load_stage(data, "dpo", seed=1)


def test_texts_and_conversations_are_mixed_for_sft(tmp_path: Path) -> None:
    texts = [{"text": f"Once, {i} dwarfs lived in a forest."} for i in range(100)]
    data = of({"path": write(tmp_path / "texts.jsonl", texts)}, {"path": write(tmp_path / "a.jsonl", chats(range(50)))})
    records = load_stage(data, "sft", seed=1)
    kinds = [type(record) for record in records.train + records.held_out]
    assert kinds.count(Document) == 100 and Conversation in kinds
    assert not prompts(records.train) & prompts(records.held_out)
    assert {type(record) for record in load_stage(data, "ppo", seed=1).train} == {Prompt}
    assert DataReader(data, seed=1).held_out()
    with pytest.raises(UserError, match=r"Stage ppo needs prompts.*texts\.jsonl \(columns text\) has text.* for sft"):
        load_stage(of({"path": str(tmp_path / "texts.jsonl")}), "ppo", seed=1)


def test_renamed_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"frage": f"q {i}", "antwort": f"a {i}", "prompt": 7} for i in range(50)])
    source = {"path": path, "stages": ["sft"], "columns": {"frage": "prompt", "antwort": "completion"}}
    record = load_stage(of(source), "sft", seed=1).train[0]
    assert record.messages[0].content.startswith("q ") and record.messages[1].content.startswith("a ")
    with pytest.raises(UserError, match=r"no column wrong.*Columns found: antwort, frage, prompt"):
        load_stage(of(source | {"columns": {"wrong": "prompt"}}), "sft", seed=1)


def test_a_renamed_column_no_longer_counts_under_its_old_name(tmp_path: Path) -> None:
    rows = [{"prompt": "old", "mine": f"q {i}", "input": "note", "answer": f"a {i}"} for i in range(50)]
    columns = {"prompt": "first", "mine": "question", "input": "comment"}
    source = {"path": write(tmp_path / "a.jsonl", rows), "stages": ["ppo"], "columns": columns}
    for record in DataReader(of(source), seed=1, keeps_rows=True).stage("ppo").train:
        assert record.messages[0].content == record.row["mine"]  # a reward function receives the row of the file
        assert record.row["prompt"] == record.row["first"] == "old"


def test_the_demo_has_separate_rows_for_each_stage() -> None:
    data = of({"builtin": "demo"}, demo_examples=200)
    for stage in STAGES:
        records = load_stage(data, stage, seed=1)
        assert records.train and records.held_out
        assert not prompts(records.train) & prompts(records.held_out)
        assert "reserved for other stages" not in records.skipped


def test_a_local_copy_is_preferred_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    hub = datasets.Dataset.from_list(chats(range(100, 150)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: hub)
    local = write(tmp_path / "a.jsonl", chats(range(50)))
    for path, first in ((local, "answer 0"), (local + ".absent", "answer 100")):
        source = {"path": path, "hub": "a/b", "stages": ["sft"]}
        answers = {r.messages[-1].content for r in load_stage(of(source), "sft", seed=1).train}
        assert first in answers


def test_columns_of_a_hub_data_set_without_values_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    hub = datasets.Dataset.from_list([{**row, "label": None, "chosen": None} for row in chats(range(50))])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: hub)
    assert len(load_stage(of({"hub": "a/b", "stages": ["sft"]}), "sft", seed=1).train) > 40


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_valid_and_serves_all_stages(path: Path) -> None:
    data = DataConfig(**yaml.safe_load(path.read_text()))
    assert data.name == path.stem
    assert {stage for source in data.sources for stage in source.stages} == set(STAGES)


def test_gsm8k() -> None:
    folder = ROOT.parent / "shared/data/gsm8k"
    if not folder.is_dir():
        pytest.skip("no shared/data/gsm8k beside this checkout")
    text = (CONF / "gsm8k.yaml").read_text()
    data = DataConfig(**yaml.safe_load(text.replace("gsm8k/", f"{folder}/")))
    reader = DataReader(data, seed=1)
    loaded = {stage: reader.stage(stage) for stage in (*STAGES, "dpo")}
    assert len(loaded["sft"].held_out) == len(loaded["ppo"].held_out) == 1000
    held_out = set().union(*(prompts(records.held_out) for records in loaded.values()))
    assert not any(prompts(records.train) & held_out for records in loaded.values())
    assert loaded["reward"].train and loaded["reward"] == loaded["dpo"] and loaded["reward"].held_out


def test_labelled_answers_are_used_by_kto(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "completion": f"a {i} {j}", "label": j == 0} for i in range(60) for j in range(2)]
    data = DataConfig(name="x", path=write(tmp_path / "a.jsonl", rows))
    parts = {stage: load_stage(data, stage, seed=1, labels=True) for stage in ("sft", "dpo")}
    assert all(isinstance(record, LabelledAnswer) for record in parts["dpo"].train + parts["dpo"].held_out)
    assert {record.label for record in parts["dpo"].train} == {True, False}
    prompts = {stage: {digest(record) for record in part.train} for stage, part in parts.items()}
    assert prompts["sft"] and prompts["dpo"] and not prompts["sft"] & prompts["dpo"]
    with pytest.raises(
        UserError,
        match=r"Stage dpo needs prompt \+ chosen \+ rejected.*has labelled.* dpo with dpo=kto",
    ):
        load_stage(data, "dpo", seed=1)
