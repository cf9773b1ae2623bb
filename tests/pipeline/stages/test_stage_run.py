"""The folder of a stage: checkpoints, resume after a kill, metrics, the summary, and errors of writing."""

import errno
import json
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.checkpoint.storage import Writer
from engine.config import LossScale
from engine.oom import PassOutOfMemory
from engine.parallel import dist
from pipeline import progress
from pipeline.config.stage_sections import PpoSection, SftSection
from pipeline.errors import RestartStage, Stopped, UserError, handle_signals, raise_stopped
from pipeline.files import explained_disk, write_atomically, write_json
from pipeline.progress import Progress, Row
from pipeline.stages import stage_run
from pipeline.stages.restart import read_limits, within_limits
from pipeline.stages.stage_run import StageRun
from pipeline.tracking import metrics
from tests.tiny import tiny_config


def engine_of(seed: int = 1) -> Engine:
    torch.manual_seed(seed)
    return Engine(nn.Linear(3, 2), EngineConfig(dtype="fp32"), optimizer=OptimizerConfig(lr=0.1, total_steps=30))


def stage_of(folder: Path, steps: int = 6, seed: int = 1, **keys: Any) -> tuple[StageRun, Engine]:
    engine = engine_of(seed)
    others = ("watchers", "extra", "restore_extra", "profile", "best_metric")
    rest = {name: keys.pop(name) for name in others if name in keys}
    section = PpoSection(**keys) if "guard" in keys else SftSection(**keys)
    return StageRun(folder, section, steps, {"net": engine}, **rest), engine


def squared(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return module(x).square().sum(), {}


def zero_to_a_power(module: nn.Module, power: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return (module(torch.ones(1, 3)) * 0.0).abs().pow(power).sum(), {}


def work(stage: StageRun, engine: Engine, first: int, last: int) -> None:
    """Run steps like a stage."""
    for step in range(first, last + 1):
        with stage.clock.phase("train"):
            x = torch.randn(4, 3)  # from the generator whose state a checkpoint contains
            update = engine.update([x.to(dist.world().device)], squared, 4)
        stage.clock.tokens += 10
        stage.log(step, {"loss": update.loss})
        stage.save(step)


def names(folder: Path) -> list[str]:
    actual = (p.name for p in (folder / "checkpoints").glob("*"))
    return sorted(actual, key=lambda name: int(name.removesuffix(".tmp").split("-")[1]))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("steps", "save_every", "is_large", "late", "saved"),
    [
        (6, 4, False, 0, [4, 6]),
        (6, 3, False, 0, [3, 6]),
        (5, 9, False, 0, [5]),
        (5, 0, False, 0, [1, 2, 3, 4, 5]),
        (25, 0, False, 4, [3, 4, 6, 9, 12, 15, 18, 21, 24, 25]),
        (25, 4, False, 5, [4, 8, 12, 16, 20, 24, 25]),
        (25, 0, True, 17, [17, 25]),  # ten checkpoints of 96 GB take longer than the steps of a short stage
        (25, 5, True, 17, [5, 10, 15, 20, 25]),
        (30_000, 0, True, 4, [10, 30_000]),
    ],
)
def test_checkpoints_are_saved_periodically_by_the_clock_and_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    save_every: int,
    is_large: bool,
    late: int,
    saved: list[int],
) -> None:
    """The last checkpoint is too old before step `late`."""
    if is_large:
        monkeypatch.setattr(stage_run, "LARGE", 8 * 12 - 1)  # the model has 8 parameters
    stage, _ = stage_of(tmp_path, steps, save_every=save_every, keep_checkpoints=99)
    for step in range(1, steps + 1):
        stage._saved_at -= stage_run.SECONDS_BETWEEN_SAVES if step == late else 0.0
        stage.save(step)
        stage.save(step)  # a second save of the same step has no effect
    stage.checkpoints.wait()
    assert names(tmp_path) == [f"step-{n}" for n in saved]


def test_a_checkpoint_that_a_slow_disk_writes_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and earlier saves took a second, so that the limit is a minute, and the disk needs several."""
    row = Row()
    monkeypatch.setattr(progress, "_progress", Progress(row))
    limits = []
    with stage_of(tmp_path, 2, save_every=1)[0] as stage:
        progress.own().begin_step(1, 1.0)
        stage.save(1)
        progress.own().begin_step(2, 1.0)
        for name in ("save", "wait"):
            monkeypatch.setattr(stage.checkpoints._checkpointer, name, lambda *_, **__: limits.append(row.read().limit))
        stage.save(2)
        stage.checkpoints.wait()
        assert row.read().limit == progress.SHORTEST
    assert limits[:2] == [progress.UNMEASURED] * 2


@pytest.mark.parametrize("keep", [1, 2])
def test_keeps_the_newest_checkpoints(tmp_path: Path, keep: int) -> None:
    with stage_of(tmp_path, 6, save_every=1, keep_checkpoints=keep)[0] as stage:
        for step in range(1, 7):
            stage.save(step)
            full = [name for name in names(tmp_path) if not name.endswith(".tmp")]
            assert step == 1 or full  # the older checkpoint remains until the next one is complete
    assert names(tmp_path) == [f"step-{n}" for n in range(7 - keep, 7)]


def test_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    through, engine = stage_of(tmp_path / "a", save_every=2)
    work(through, engine, 1, 6)
    through.checkpoints.wait()
    killed, engine = stage_of(tmp_path / "b", save_every=2)
    work(killed, engine, 1, 5)  # killed here: two checkpoints, five lines
    killed.checkpoints.wait()
    (tmp_path / "b" / "checkpoints" / "step-6.tmp").mkdir()
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    fresh, engine = stage_of(tmp_path / "b", seed=7, save_every=2)
    assert fresh.restore() == 4
    assert [line["step"] for line in lines(tmp_path / "b")] == [1, 2, 3, 4]
    assert names(tmp_path / "b") == ["step-2", "step-4"]
    work(fresh, engine, 5, 6)
    fresh.checkpoints.wait()
    ours, theirs = lines(tmp_path / "b"), lines(tmp_path / "a")
    assert [(x["step"], x["loss"], x["tokens"]) for x in ours] == [(x["step"], x["loss"], x["tokens"]) for x in theirs]
    assert [x["seconds"] for x in ours] == sorted(x["seconds"] for x in ours)


def test_a_damaged_checkpoint_is_reported_and_the_older_one_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    through, engine = stage_of(tmp_path / "a", save_every=2)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    work(through, engine, 1, 6)
    through.checkpoints.wait()
    killed, engine = stage_of(tmp_path / "b", save_every=2, keep_checkpoints=3)
    work(killed, engine, 1, 6)
    killed.checkpoints.wait()
    places = {n: tmp_path / "b" / "checkpoints" / f"step-{n}" for n in (2, 4, 6)}
    (places[6] / "tensors-0.safetensors").unlink()
    (places[4] / "state.json").write_text("{}")
    fresh, engine = stage_of(tmp_path / "b", seed=7, save_every=2, keep_checkpoints=1)
    assert fresh.restore() == 2
    output = capsys.readouterr().out
    assert f"{places[6]} is damaged (tensors-0.safetensors is missing)" in output and "step-4.damaged" in output
    assert "resumes after step 2 of 6" in output
    work(fresh, engine, 3, 4)
    fresh.checkpoints.wait()
    assert sorted(p.name for p in places[4].parent.iterdir()) == ["step-4", "step-4.damaged", "step-6.damaged"]
    work(fresh, engine, 5, 6)
    fresh.checkpoints.wait()
    assert [x["loss"] for x in lines(tmp_path / "b")] == [x["loss"] for x in lines(tmp_path / "a")]


def test_a_stage_with_only_damaged_checkpoints_does_not_restart(tmp_path: Path) -> None:
    stage, engine = stage_of(tmp_path, save_every=2)
    work(stage, engine, 1, 4)
    stage.checkpoints.wait()
    for place in (tmp_path / "checkpoints").iterdir():
        (place / "tensors-0.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"step-4: tensors-0.safetensors is missing; step-2: .* delete that folder"):
            stage_of(tmp_path)[0].restore()
    assert names(tmp_path) == ["step-2", "step-4"] and len(lines(tmp_path)) == 4


def test_a_stop_signal_ends_the_stage_after_the_step(tmp_path: Path) -> None:
    stage, engine = stage_of(tmp_path, save_every=5)
    try:
        with pytest.raises(Stopped), stage:
            for step in stage.steps_left():
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                work(stage, engine, step, step)
    finally:
        dist.stop()
    assert names(tmp_path) == ["step-2"] and len(lines(tmp_path)) == 2
    fresh, _ = stage_of(tmp_path, save_every=5)
    assert fresh.restore() == 2


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stop_between_the_last_step_and_the_end_keeps_that_step(at_once: bool, tmp_path: Path) -> None:
    stage, engine = stage_of(tmp_path, save_every=5)
    try:
        with pytest.raises(Stopped), stage:
            for step in stage.steps_left():
                work(stage, engine, step, step)
                if at_once and step == 6:  # no further update would pass the stop to other ranks
                    os.kill(os.getpid(), signal.SIGUSR1)
            assert not at_once, "the steps have raised it"
            with handle_signals(raise_stopped):
                os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        dist.stop()
    assert names(tmp_path)[-1] == "step-6"
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_all_state_besides_weights_is_restored(tmp_path: Path) -> None:
    taken: list[dict[str, Any]] = []
    stage, engine = stage_of(tmp_path, save_every=2, extra=lambda: {"kl_coef": 0.07})
    stage.note_best(1, "eval_loss", 2.0, higher=False)
    work(stage, engine, 1, 2)
    stage.checkpoints.wait()
    fresh, _ = stage_of(tmp_path, save_every=2, restore_extra=taken.append)
    fresh.restore()
    assert taken == [{"kl_coef": 0.07}]
    assert fresh.best == {"eval_loss": 2.0} and fresh.clock.tokens == 20 and fresh.last["step"] == 2
    assert fresh.clock.seconds["train"] == pytest.approx(stage.clock.seconds["train"])
    assert fresh.clock.lap()["tokens_per_second"] == 0.0  # the lap starts at the resume


@pytest.mark.parametrize("holds_graphs", [False, True])
def test_a_pass_out_of_memory_leaves_smaller_limits_for_the_next_start(holds_graphs: bool, tmp_path: Path) -> None:
    folder = tmp_path / "ppo"
    folder.mkdir()
    config = tiny_config(ppo={"micro_batch_tokens": 500, "shared_forward": True, "minibatches": 1})
    sizes = list[int]()
    for _ in range(3):
        section = within_limits(config, "ppo", folder).ppo
        assert section.shared_forward == (not holds_graphs or not sizes)
        sizes.append(section.micro_batch_tokens)
        stage = StageRun(folder, section, 2, {}, longest=200)
        expected = UserError if sizes[-1] == 200 else RestartStage
        with pytest.raises(expected, match="no memory"), stage:
            raise PassOutOfMemory("no memory", holds_graphs=holds_graphs and len(sizes) == 1)
    assert sizes == ([500, 500, 250] if holds_graphs else [500, 250, 200])
    assert read_limits(folder).restarts == (3 if holds_graphs else 2)


def test_a_run_killed_before_its_first_checkpoint_restarts(tmp_path: Path) -> None:
    stage, _ = stage_of(tmp_path)
    stage.log(0, {"lr": 0.0})
    stage.log(1, {"loss": 1.0})
    fresh, _ = stage_of(tmp_path)
    assert fresh.restore() == 0
    fresh.log(0, {"lr": 0.0})
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_phases_and_laps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = stage_of(tmp_path)
    now = 100.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    for _ in range(2):
        with stage.clock.phase("generate"):
            now += 0.75
    with pytest.raises(KeyError), stage.clock.phase("evaluate"):
        now += 0.5
        raise KeyError
    stage.clock.tokens += 500
    stage.clock.move("generate", "flip", 0.25)
    assert stage.clock.seconds == {"generate": 1.25, "evaluate": 0.5, "flip": 0.25}
    # The time of evaluation is excluded: 500 tokens in 1.5 seconds.
    assert stage.clock.lap() == {"generate_seconds": 1.25, "flip_seconds": 0.25, "tokens_per_second": 333.3}
    with stage.clock.phase("train"):
        now += 0.5
    stage.clock.tokens += 30
    lap = stage.clock.lap()
    assert lap == {"generate_seconds": 0, "flip_seconds": 0, "train_seconds": 0.5, "tokens_per_second": 60}
    assert stage.clock.rate() == 265  # 530 tokens in 2 seconds


def test_lines_of_metrics(tmp_path: Path) -> None:
    """A line is due after every third step, the first and the last one, for an evaluation, and for a note."""
    seen: list[tuple[int, str]] = []

    class Watching:
        def log(self, step: int, metrics: Mapping[str, float], note: str) -> None:
            assert "guard" not in metrics
            seen.append((step, note))

    stage, _ = stage_of(tmp_path, 8, log_every=3, eval_every=5, watchers=[Watching()])
    note = "guard: the KL rose"
    for step in range(1, 9):
        stage.log(step, {"loss": math.nan if step == 3 else step / 2}, note if step == 4 else "")
    assert seen == [(1, ""), (3, ""), (4, note), (5, ""), (6, ""), (8, "")]
    written = [(line["step"], line["loss"], line.get("guard", "")) for line in lines(tmp_path)]
    assert written == [(1, 0.5, ""), (3, None, ""), (4, 2.0, note), (5, 2.5, ""), (6, 3.0, ""), (8, 4.0, "")]
    assert stage.last["loss"] == 4.0 and "guard" not in stage.last


def test_evaluations(tmp_path: Path) -> None:
    assert [s for s in range(1, 8) if stage_of(tmp_path, 7, eval_every=3)[0].evaluates(s)] == [3, 6, 7]
    assert [s for s in range(1, 8) if stage_of(tmp_path, 7)[0].evaluates(s)] == [7]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_nan_loss_stops_with_its_batch(tmp_path: Path, loss: float) -> None:
    stage, _ = stage_of(tmp_path)
    stage.require_finite(4, 1.0, [])
    with pytest.raises(UserError, match="at step 5") as error:
        stage.require_finite(5, loss, [torch.tensor([1, 2]), [3]])
    path = tmp_path / "nan-step-5-rank-0.json"
    assert str(path) in str(error.value) and json.loads(path.read_text()) == [[1, 2], [3]]
    assert "the stage starts again" in str(error.value)  # another learning rate is another run of the stage


def test_a_full_disk_is_one_message_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stage, engine = stage_of(tmp_path, save_every=1)
    work(stage, engine, 1, 1)
    stage.checkpoints.wait()
    monkeypatch.setattr(Writer, "write_data", full)
    stage.save(2)
    with pytest.raises(UserError, match="the disk is full") as error:
        stage.save(3)
    assert "run the same command again to resume" in str(error.value) and "Traceback" not in str(error.value)
    assert names(tmp_path) == ["step-1"]  # an incomplete checkpoint would still fill the disk
    monkeypatch.undo()
    fresh, _ = stage_of(tmp_path, save_every=1)
    assert fresh.restore() == 1
    assert names(tmp_path) == ["step-1"]


def test_other_write_errors_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Read-only"), explained_disk(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(UserError, match="gone is gone: its disk is no longer mounted, or"):
        stage_of(tmp_path / "gone")[0].log(1, {"loss": 0.5})
    with pytest.raises(ZeroDivisionError), explained_disk(tmp_path):
        raise ZeroDivisionError


def test_summary(tmp_path: Path) -> None:
    stage, _ = stage_of(tmp_path / "sft", steps=2)
    stage.folder.mkdir()
    with stage.clock.phase("train"):
        time.sleep(0.02)
    stage.clock.tokens = 100
    stage.log(2, {"loss": 0.25})
    stage.note_best(2, "eval_loss", 0.5, higher=False)
    stage.finish({"gold_score": 0.75})
    actual = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert (actual["stage"], actual["steps"], actual["tokens"], actual["gold_score"]) == ("sft", 2, 100, 0.75)
    assert actual["final"]["loss"] == 0.25 and actual["best"] == {"eval_loss": 0.5}
    assert actual["tokens_per_second"] == pytest.approx(100 / stage.clock.seconds["train"], rel=0.01)
    assert actual["peak_memory_by_rank"][0]["host_bytes"] > 10**7


def test_the_summary_of_a_resumed_stage_has_the_memory_of_earlier_phases(tmp_path: Path) -> None:
    stage, engine = stage_of(tmp_path / "sft", steps=2)
    stage.folder.mkdir()
    work(stage, engine, 1, 2)
    stage.checkpoints.wait()
    resumed, engine = stage_of(tmp_path / "sft", steps=2)
    resumed.restore()
    engine.memory_tracker.sample("score")
    resumed.finish({})
    measured = json.loads((tmp_path / "sft" / "summary.json").read_text())["memory"]["measured"]
    assert measured["train"]["parameters"] == 32 and measured["score"]["parameters"] == 32  # 8 parameters in fp32


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_steps_with_non_finite_gradients_are_counted_and_reported(
    dtype: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(dtype=dtype, loss_scale=LossScale(initial_power=4, hysteresis=1))
    for good, message in ((0, 1), (1, 0)):
        engine = Engine(nn.Linear(3, 2), config, optimizer=OptimizerConfig(lr=0.1))
        (tmp_path / str(good)).mkdir()
        stage = StageRun(tmp_path / str(good), SftSection(), 2 + good, {"net": engine})
        for step in range(1, 3 + good):
            power = 1.0 if step == 3 else 0.5  # the square root of 0 has an infinite slope
            update = engine.update([torch.full((1, 1), power)], zero_to_a_power, 1)
            stage.log(step, {"loss": update.loss, "grad_norm": update.grad_norm, "lr": update.lr})
        stage.finish({})
        actual = [line.get("grad_norm", "none") for line in lines(tmp_path / str(good))]
        assert actual == ["none", "none", 0.0][: 2 + good]
        output = capsys.readouterr().err
        assert (
            output.count(f"{good}: all 2 steps were skipped because no gradient was finite: the model did not change")
            == message
        )


def test_json_is_written_atomically(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.json", "\ud83d")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]  # no temporary file


def test_a_checkpoint_waits_until_the_disk_has_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may fail after the checkpoint. Then a log without its last steps would make a resumed run incomplete."""
    synced: list[dict[str, int]] = []

    def record(paths: Iterable[Path]) -> None:
        synced.append({path.name: len(path.read_text().splitlines()) for path in paths})

    monkeypatch.setattr(stage_run, "sync", record)
    stage, _ = stage_of(tmp_path, 2)
    stage.restore()
    for step in stage.steps_left():
        stage.log(step, {"loss": 1.0})
        stage.save(step)
    stage.checkpoints.wait()
    assert synced == [{"metrics.jsonl": 1}, {"metrics.jsonl": 2}]
