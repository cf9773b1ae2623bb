"""The watchers of a stage: wandb offline, a failing wandb, and progress lines."""

import json
import os
import resource
import sys
from datetime import datetime
from types import ModuleType, SimpleNamespace

import pytest

from pipeline.tracking import trackers, watchers
from pipeline.tracking.trackers import TensorBoard, Wandb, _stable_id, logged_in, open_wandb
from pipeline.tracking.watchers import ProgressDisplay, _outlook, open_watchers, sample_table
from tests import composed


@pytest.fixture
def offline_run(monkeypatch, tmp_path):
    """Remove all logins of wandb, and return the folder of a stage."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    stage_dir = tmp_path / "run" / "sft"
    stage_dir.mkdir(parents=True)
    return stage_dir


def config_of(*overrides: str):
    return composed.config_of("model=gpt2", *overrides)


def test_wandb_runs_offline_without_a_login(offline_run, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))  # a judge may have imported this module
    monkeypatch.delenv("WANDB_DISABLE_WEAVE", raising=False)
    tracker = open_wandb(config_of(), "sft", offline_run)
    tracker.log(1, {"loss": 2.0})
    tracker.table(1, "samples", ["prompt", "sft"], [["hi", "hello"]])
    tracker.finish()
    assert list((offline_run.parent / "wandb").glob("offline-run-*/run-*.wandb"))
    kept = (offline_run / ".wandb-id").read_text()
    again = open_wandb(config_of(), "sft", offline_run)
    again.finish()
    assert all(kept in run.name for run in (offline_run.parent / "wandb").glob("offline-run-*"))
    assert capfd.readouterr() == ("", "")


def test_without_a_connection_the_run_is_stored_for_upload(offline_run, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no process listens on this port
    monkeypatch.setattr(trackers, "ONLINE_PATIENCE", 1.0)
    tracker = open_wandb(config_of(), "sft", offline_run)
    tracker.log(1, {"loss": 2.0})
    tracker.finish()
    (folder,) = (offline_run.parent / "wandb").glob("offline-run-*")
    errors = capfd.readouterr().err
    assert f"sft is tracked offline. Upload it later: wandb sync {folder}" in errors
    assert "wandb stopped" not in errors


def test_a_key_that_wandb_refuses_is_named(offline_run, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    open_wandb(config_of(), "sft", offline_run).finish()
    start, _, rest = capfd.readouterr().err.partition(", so sft is tracked offline. Upload it later: wandb sync ")
    assert start.startswith("warning: wandb cannot be used online (") and "API key" in start and rest


def test_tracking_none_does_not_import_wandb(offline_run):
    with open_watchers(config_of("tracking=none"), "sft", offline_run, 3) as opened:
        for watcher in opened:
            watcher.log(1, {"loss": 1.0})
    assert not (offline_run.parent / "wandb").exists()


class Receiving:
    """A wandb run that stores what it receives. With `error`, it fails."""

    def __init__(self, error=None):
        self.lines, self.error = [], error

    def log(self, line, step=None):
        self.lines.append((step, line))
        if self.error is not None:
            raise self.error

    def finish(self, exit_code):
        self.lines.append(exit_code)


def test_a_tracker_that_fails_is_reported_once(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")  # or a full disk
    run = Receiving(ConnectionError("gone\nfar away"))
    for tracker in (Wandb(run), TensorBoard(tmp_path, "sft")):
        for step in range(3):
            tracker.log(step, {"loss": 1.0})
        tracker.finish()
    assert len(run.lines) == 1
    wandb, tensorboard = capsys.readouterr().err.splitlines()
    assert "warning: wandb stopped (ConnectionError: gone)" in wandb and "warning: TensorBoard stopped (" in tensorboard


def test_a_note_of_the_guard_reaches_wandb_and_the_log(capsys):
    run = Receiving()
    Wandb(run).log(3, {"loss": 1.0}, "guard: the KL rose")
    assert run.lines == [(3, {"train/loss": 1.0, "guard": "guard: the KL rose"})]
    ProgressDisplay("ppo", 8).log(3, {"score": 0.5}, "guard: the KL rose")
    assert capsys.readouterr().err == "ppo 3/8  score 0.5\nppo: step 3: guard: the KL rose\n"


def test_a_wandb_that_cannot_start_is_reported(offline_run, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sideways")
    assert open_wandb(config_of(), "sft", offline_run) is None
    assert "metrics.jsonl is still written" in capsys.readouterr().err


def test_an_id_that_a_full_disk_refused_is_made_by_the_next_start(offline_run):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            _stable_id(offline_run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    made = _stable_id(offline_run)
    assert len(made) == 16 and _stable_id(offline_run) == made


def test_the_search_for_a_key_does_not_use_the_network(offline_run, monkeypatch):
    import wandb

    assert not logged_in()
    host = wandb.Settings().base_url.split("//")[1]
    (offline_run.parents[1] / "netrc").write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    assert logged_in()
    monkeypatch.setenv("NETRC", os.devnull)
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert logged_in()


@pytest.fixture
def clock(monkeypatch):
    """Replace the clocks of `pipeline.tracking.watchers` by a list with one number of seconds, which begins at noon."""
    seconds, noon = [0.0], datetime(2026, 1, 2, 12)
    monkeypatch.setattr(watchers, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(watchers, "datetime", SimpleNamespace(now=lambda: noon))
    return seconds


@pytest.fixture
def lines_of(clock, capsys):
    """A function that returns the progress lines for metrics at some seconds."""

    def lines(progress_steps, clock_steps):
        progress = ProgressDisplay("sft", 100)
        for (step, metrics), clock[0] in zip(progress_steps, clock_steps, strict=True):
            progress.log(step, metrics)
        return capsys.readouterr().err.splitlines()

    return lines


def test_lines_are_printed_first_periodically_and_last(lines_of):
    logged = [(step, {"loss": 1.0 / step, "grad_norm": 9.0}) for step in range(1, 101)]
    lines = lines_of(logged, [0.1 * step for step in range(1, 101)])
    assert [line.split()[1] for line in lines] == ["1/100", "51/100", "100/100"]
    assert lines[1] == "sft 51/100  loss 0.01961  4.9 s left"
    assert "grad_norm" not in lines[0]


def test_progress_shows_stage_speed_and_remaining_time(offline_run, clock, capsys):
    """50 of 100 steps took 50 s. The plan has evaluations of 20 steps, and later stages of 50 steps.

    The evaluation before the first step took 8 of the 20 s.
    """
    plan = {"seconds": {"train": 0.08, "step": 0.02}, "stage_seconds": 12.0, "later_seconds": 5.0}
    (offline_run / "plan.json").write_text(json.dumps(plan))
    outlook = _outlook(config_of("tracking=none"), "sft", offline_run, 100)
    assert outlook == pytest.approx({"place": "stage 1 of 3", "evaluations": 20.0, "later": 50.0})
    one_stage = _outlook(config_of("tracking=none", "stage=sft"), "sft", offline_run, 100)
    assert one_stage == pytest.approx({"evaluations": 20.0})
    progress = ProgressDisplay("sft", 100, **outlook)
    clock[0] = 8.0
    progress.log(0, {"tokens": 10})
    clock[0] = 58.0
    progress.log(50, {"tokens": 5010, "loss": 1.0})
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown == "sft (stage 1 of 3) 50/100  loss 1  100 tokens/s  1.0 min left, run ends about Fri 12:01"
    clock[0] = 88.0  # a step took a second, and an evaluation 20 s: both are in the speed
    progress.log(60, {"tokens": 6010, "loss": 1.0, "eval_loss": 1.0})
    assert "  53 s left, run ends about Fri 12:02" in capsys.readouterr().err
    clock[0] = 6 * 86400.0 + 8.0
    progress.log(60, {"loss": 1.0})
    assert capsys.readouterr().err.endswith("96.0 h left, run ends about 11 Jan 12:00\n")


@pytest.mark.parametrize(
    ("stage", "figures"),
    [("ppo", {"score": 0.0, "alike_prompts": 1.0}), ("dpo", {"label_accuracy": 0.5, "eval_label_accuracy": 0.75})],
)
def test_figures_that_some_methods_have_are_shown(stage, figures, capsys):
    ProgressDisplay(stage, 9).log(1, figures)
    shown = "  ".join(f"{key} {value:g}" for key, value in figures.items())
    assert capsys.readouterr().err == f"{stage} 1/9  {shown}\n"


def test_figures_before_the_first_step_are_labelled(lines_of):
    assert lines_of([(0, {"loss": 1.0})], [0.0]) == ["sft before its first step  loss 1"]


def test_each_evaluation_has_a_line(lines_of):
    """The line of step 2 follows that of step 1 within 5 seconds."""
    steps = [
        (1, {"loss": 2.0}),
        (2, {"eval_loss": 2.0, "loss": 1.5}),
        (3, {"loss": 1.0}),
        (4, {"loss": 0.5}),
    ]
    assert lines_of(steps, [0.0, 1.0, 2.0, 18.0]) == [
        "sft 1/100  loss 2",
        "sft 2/100  loss 1.5  eval_loss 2  1.6 min left",
        "sft 4/100  loss 0.5  9.6 min left",
    ]


def test_samples_become_a_table(tmp_path):
    file = tmp_path / "samples.jsonl"
    prompt = [{"role": "user", "content": "2+2?"}]
    rows = [
        {
            "prompt": prompt,
            "temperature": 1,
            "answers": {"sft": "4", "ppo": "four"},
            "scores": {"sft": 0.1, "ppo": 0.9},
        },
        {"prompt": prompt, "temperature": 0.5, "answers": {"ppo": "5"}, "scores": {"ppo": -1.0}, "gold": {"ppo": 0.0}},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns, table = sample_table(file)
    assert columns == ["prompt", "temperature", "sft", "ppo", "scores sft", "scores ppo", "gold sft", "gold ppo"]
    assert table[0] == ["user: 2+2?", 1.0, "4", "four", 0.1, 0.9, None, None]
    assert table[1] == ["user: 2+2?", 0.5, "", "5", None, -1.0, None, 0.0]
    assert sample_table(tmp_path / "none.jsonl") == ([], [])


def test_the_link_is_shown_at_the_end(capsys):
    run = Receiving()
    tracker = Wandb(run, closing="sft: https://example.org/run")
    tracker.log(5, {"loss": 1.0})
    assert capsys.readouterr().out == ""
    tracker.finish()
    assert run.lines == [(5, {"train/loss": 1.0}), 0]
    assert capsys.readouterr().out == "sft: https://example.org/run\n"
