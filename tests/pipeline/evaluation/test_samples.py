import json
from pathlib import Path

from pydantic import TypeAdapter

from pipeline.data.records import Message
from pipeline.evaluation.samples import Sample, read_samples, write_samples
from tests.pipeline.data.templates import to_records
from tests.pipeline.data.test_formats import table_of
from tests.pipeline.report.example_runs import HOSTILE


def test_samples_are_written_and_read_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = [
        Sample((Message("system", "Be brief."), Message("user", HOSTILE)), {"base": "", "sft": HOSTILE}, {"sft": -1.5}),
        Sample((Message("user", "line\nbreak\u2028here"),), {"ppo": "5"}, gold={"ppo": 1.0}),
    ]
    write_samples(path, samples)
    assert read_samples(path) == samples
    assert [item.name for item in tmp_path.iterdir()] == ["samples.jsonl"]


def test_prompts_are_written_as_rows_of_data_files(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Add.", "tools": [{"type": "function", "function": {"name": "add"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "", "name": "add"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "1", "reasoning_content": "easy"},
        {"role": "user", "content": "Thanks."},
    ]
    (tmp_path / "samples.jsonl").write_text(json.dumps({"prompt": turns, "answers": {"ppo": "5"}}))
    (sample,) = read_samples(tmp_path / "samples.jsonl")
    assert [message.role for message in sample.prompt] == [turn["role"] for turn in turns]
    write_samples(tmp_path / "samples.jsonl", [sample])
    assert json.loads((tmp_path / "samples.jsonl").read_text())["prompt"] == turns
    assert read_samples(tmp_path / "samples.jsonl") == [sample]
    table = table_of("t", [{"prompt": turns, "tools": turns[0]["tools"]}])  # as read from a data file
    (record,), _ = to_records(table, "ppo", "s", bad_row_limit=0.0)
    write_samples(tmp_path / "samples.jsonl", [Sample(record.messages, {})])
    assert read_samples(tmp_path / "samples.jsonl")[0].prompt == record.messages


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write_samples(path, [Sample((Message("user", "hi"),), {"sft": "hello"})])
    with path.open("a") as lines:
        lines.write('[1]\n{"prompt": 3}\n{"prompt": [{"role": "user"}], "answers": {}}\n')
        lines.write('{"prompt": [], "answers": null}\nnot json\n{"prompt": [{"role": "us')
    assert len(read_samples(path)) == 1
    assert read_samples(tmp_path / "missing.jsonl") == []


def test_scores_that_are_not_finite_are_skipped() -> None:
    row = {"prompt": [], "answers": {}, "scores": {"a": float("nan"), "b": float("inf"), "d": 2}}
    assert TypeAdapter(Sample).validate_python(row).scores == {"d": 2.0}
