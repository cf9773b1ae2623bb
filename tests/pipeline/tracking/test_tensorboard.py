"""TensorBoard: sections, tables and notes in its files, repeated steps, and the missing package."""

import json
import re
from pathlib import Path

import pytest

from pipeline.config.check_machine import check_paths
from pipeline.errors import UserError
from pipeline.tracking.trackers import OTHER, TensorBoard, section_of
from pipeline.tracking.watchers import open_watchers
from tests import composed

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "outputs.md"


def events(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[str]]]:
    """Return the scalars and texts that TensorBoard reads from a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder))
    files.Reload()
    scalars = {name: [(each.step, each.value) for each in files.Scalars(name)] for name in files.Tags()["scalars"]}
    texts = {
        name: [each.tensor_proto.string_val[0].decode() for each in files.Tensors(name)]
        for name in files.Tags()["tensors"]
    }
    return scalars, texts


def test_a_stage_writes_figures_by_section_tables_and_notes(tmp_path):
    config = composed.config_of("tracking=tensorboard")
    check_paths(config)
    stage = tmp_path / "sft"
    stage.mkdir()
    row = {"prompt": [{"role": "user", "content": "<b>2|2?"}], "answers": {"sft": "4\n5"}, "scores": {"sft": 0.25}}
    row["temperature"] = 0.5
    (stage / "samples.jsonl").write_text(json.dumps(row) + "\n")
    with open_watchers(config, "sft", stage, 2) as watchers:
        for watcher in watchers:
            watcher.log(1, {"loss": 2.0, "lr": 0.5, "eval_loss": float("nan")}, "the KL rose")
    scalars, texts = events(tmp_path / "tensorboard" / "sft")
    assert scalars == {"train/loss": [(1, 2.0)], "optimizer/lr": [(1, 0.5)]}
    assert texts["guard/text_summary"] == ["the KL rose"]
    assert texts["samples/text_summary"] == [
        "| prompt | temperature | sft | scores sft |\n| --- | --- | --- | --- |\n"
        "| user: &lt;b>2\\|2? | 0.5 | 4<br>5 | 0.25 |"
    ]
    assert not (tmp_path / "wandb").exists()


def test_the_table_of_a_stage_that_stops_early_is_at_its_last_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stage = tmp_path / "sft"
    stage.mkdir()
    with open_watchers(composed.config_of("tracking=tensorboard"), "sft", stage, 24):
        (stage / "summary.json").write_text('{"steps": 3}')
        (stage / "samples.jsonl").write_text(
            json.dumps({"prompt": [], "answers": {"sft": "4"}, "temperature": 1.0}) + "\n"
        )
    files = EventAccumulator(str(tmp_path / "tensorboard" / "sft"))
    files.Reload()
    assert [each.step for each in files.Tensors("samples/text_summary")] == [3]


def test_steps_that_a_resumed_stage_repeats_are_replaced(tmp_path):
    for steps, loss in ((range(1, 5), 1.0), (range(3, 6), 2.0)):
        writer = TensorBoard(tmp_path, "sft")
        for step in steps:
            writer.log(step, {"loss": loss})
        writer.finish()
    scalars, _ = events(tmp_path / "tensorboard" / "sft")
    assert scalars["train/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_finished_stage_that_is_exported_again_keeps_its_steps(tmp_path):
    """Such a stage takes no step: it writes only the table of its answers."""
    writers = [TensorBoard(tmp_path, "sft") for _ in range(2)]
    for step in (1, 2):
        writers[0].log(step, {"loss": 1.0})
    writers[0].table(2, "samples", ["sft"], [["4"]])
    writers[1].table(2, "samples", ["sft"], [["5"]])
    for writer in writers:
        writer.finish()
    scalars, texts = events(tmp_path / "tensorboard" / "sft")
    assert scalars["train/loss"] == [(1, 1.0), (2, 1.0)]
    assert texts["samples/text_summary"][-1].endswith("| 5 |")


def test_a_missing_package_is_named_before_any_work(monkeypatch):
    monkeypatch.setattr("pipeline.tracking.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tracking.kind=both needs the package tensorboard: .*'\.\[tensorboard\]'"):
        check_paths(composed.config_of("tracking=both"))


def test_each_documented_metric_of_ppo_has_a_section():
    _, *tables = PAGE.read_text().partition("## summary.json")[0].split("### PPO:")
    rows = [line.split(" | ")[0] for table in tables for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row) if name != "guard"]  # a text
    assert len(names) > 40
    assert [name for name in names if section_of(name) == OTHER] == []


def test_the_first_section_that_matches_counts():
    expected = {"loss": "train", "gold_score_at_0": "held_out", "kl_coef": "optimizer", "kl": "policy"}
    expected |= {"critic_lr": "optimizer", "value_loss": "critic", "train_seconds": "speed"}
    assert {name: section_of(name) for name in expected} == expected
