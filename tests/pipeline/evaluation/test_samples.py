from pathlib import Path

from pydantic import TypeAdapter

from pipeline.data.records import Message
from pipeline.evaluation.samples import Sample, read_samples, write_samples
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


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write_samples(path, [Sample((Message("user", "hi"),), {"sft": "hello"})])
    with path.open("a") as lines:
        lines.write('[1]\n{"prompt": 3}\n{"prompt": [], "answers": null}\nnot json\n{"prompt": [{"role": "us')
    assert len(read_samples(path)) == 1
    assert read_samples(tmp_path / "missing.jsonl") == []


def test_scores_that_are_not_finite_are_skipped() -> None:
    row = {"prompt": [], "answers": {}, "scores": {"a": float("nan"), "b": float("inf"), "d": 2}}
    assert TypeAdapter(Sample).validate_python(row).scores == {"d": 2.0}
