"""Which stages a command runs, skips or resumes, and which files it preserves. The stages do nothing.

The tests run complete commands.
"""

import json
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import yaml

from pipeline.config import compose
from pipeline.launch import processes
from pipeline.launch.command import main
from pipeline.launch.fingerprint import hash_tree, model_content, stage_settings
from pipeline.launch.folder import _lock, open_folder
from pipeline.launch.manifest import Manifest
from pipeline.launch.stage_inputs import stage_inputs
from pipeline.launch.summary import compare_runs
from tests.composed import compose_job, config_of
from tests.forked_launch import FAKE_STAGES, FORKING, launch, launch_here
from tests.ranks import Worker

BASE = ["model=gpt2", "data=demo", "tracking=none"]


@pytest.fixture
def train(launcher, tmp_path, monkeypatch):
    """Return a function that runs a command line in an empty folder and returns (exit status, output)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stage: str = "ok") -> tuple[int, str]:
        words, environment = [*BASE, *arguments], {"FAKE_STAGE": stage}
        return launcher.call(launch_composed, tmp_path, words, environment=environment)

    return run


def launch_composed(folder: Path, arguments: list[str]) -> int:
    """Run a command line. Hydra composes each selection of options once."""
    compose._compose_job = compose_job
    return launch_here(folder, arguments, FAKE_STAGES)


@pytest.fixture
def train_here(tmp_path, monkeypatch, capsys):
    """Return the same function for commands in this process, whose functions a test can replace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "MODULES", FAKE_STAGES)
    monkeypatch.setattr(processes, "subprocess", FORKING)
    monkeypatch.setattr(compose, "_compose_job", compose_job)

    def run(*arguments: str, stage: str = "ok") -> tuple[int, str]:
        monkeypatch.setenv("FAKE_STAGE", stage)
        status = main([*BASE, *arguments])
        output = capsys.readouterr()
        return status, output.out + output.err

    return run


def starts(run_dir: str, stage: str) -> int:
    """Return how often a stage was completed in its folder."""
    return len((Path("runs") / run_dir / stage / "starts").read_text())


def record(run_dir: str, stage: str) -> dict:
    return json.loads((Path("runs") / run_dir / "manifest.json").read_text())["stages"][stage]


def test_a_run_writes_the_documented_files(train):
    status, output = train("name=x")
    assert status == 0
    assert "sft     eval_loss 0.25  gold_score 0.5\n" in output
    assert "model   runs/x/ppo/model\n" in output
    assert "talk    python chat.py runs/x\n" in output
    for stage in ("sft", "reward", "ppo"):
        stored = yaml.safe_load((Path("runs/x") / stage / "config.yaml").read_text())
        assert (stored["name"], stored["model"]["name"]) == ("x", "gpt2")
        assert record("x", stage)["status"] == "finished"
    assert record("x", "sft")["consumed"]["models"] == {"base": "hub:openai-community/gpt2"}
    models = {stage: record("x", stage)["produced"]["model"] for stage in ("sft", "reward")}
    assert record("x", "ppo")["consumed"]["models"] == {"actor": models["sft"], "reward": models["reward"]}


def test_a_finished_stage_is_skipped(train):
    train("name=x")
    status, output = train("name=x", "sft.log_every=5", "sft.micro_batch_tokens=4096", "engine=zero3", "debug=true")
    assert status == 0
    assert output.count("skipped\n") == 3
    assert starts("x", "sft") == 1
    # A judge that a finished PPO stage did not have causes a message with the way to add it.
    Path("mine.py").write_text("def grade(answer, row): return 1.0")
    judge = "evaluation.judge=mine.py:grade"
    output = train("name=x", judge)[1]
    assert "ppo: finished before with the same settings, skipped; evaluation.judge was None, is /" in output
    shutil.rmtree("runs/x/ppo/model")
    Path("runs/x/ppo/checkpoints/step-1").mkdir(parents=True)
    assert "ppo: resumes" in train("name=x", judge)[1]
    assert train("name=x", judge)[1].count("skipped\n") == 3
    with open("mine.py", "a") as file:
        file.write("\n# changed")
    assert "skipped; the file of evaluation.judge changed: delete" in train("name=x", judge)[1]
    shutil.rmtree("runs/x/ppo/model")
    assert "the file of evaluation.judge changed; earlier grades are those of the old" in train("name=x", judge)[1]


def test_a_finished_stage_tells_how_to_answer_other_prompts(train):
    more = ("name=x", "ppo.guard=off", "evaluation.prompts=256", "evaluation.best_of=2", "reward.eval_examples=512")
    train(*more[:2])
    changed = "skipped; evaluation.prompts was 128, is 256"
    output = train(*more)[1]
    assert "reward: finished before with the same settings, skipped; reward.eval_examples was 256, is 512: " in output
    assert f"sft: finished before with the same settings, {changed}: the stage keeps its earlier" in output
    assert (
        f"ppo: finished before with the same settings, {changed}; evaluation.best_of was 4, is 2: the stage " in output
    )
    Path("runs/x/ppo/checkpoints/step-1").mkdir(parents=True)
    assert "is 2: delete runs/x/ppo/model and run the same command again" in train(*more)[1]
    assert "prompts" not in train(*more[:2])[1]
    # The answers of the SFT model to the old prompts are deleted, so that the stage answers the new ones.
    shutil.rmtree("runs/x/ppo/model")
    Path("runs/x/ppo/samples.jsonl").write_text("{}")
    assert "from the newest checkpoint; evaluation.prompts was 128, is 256;" in train(*more)[1]
    assert Path("runs/x/ppo/samples.jsonl").read_text() == ""
    output = train("name=x", "ppo.guard=off", "rollout.top_k=5", "rollout.batch_size=7", "stage=sft")[1]
    assert "sft: finished before with the same settings, skipped; rollout.top_k was 0, is 5: " in output


def test_a_newer_version_does_not_repeat_finished_stages(train):
    """The newer version has additional keys."""
    train("name=x", "sft.lr=2e-5")
    file = Path("runs/x/manifest.json")
    content = json.loads(file.read_text())
    for stage, key in (("sft", "sft.warmup"), ("reward", "reward.centering"), ("ppo", "ppo.kl_in")):
        consumed = content["stages"][stage]["consumed"]
        del consumed["settings"][key]
        consumed["config"] = "of another program"
    file.write_text(json.dumps(content))
    _, output = train("name=x", "sft.lr=2e-5")
    assert output.count("skipped") == 3
    _, output = train("name=x", "sft.lr=2e-5", "ppo.kl_in=loss")
    assert "ppo: runs again (ppo.kl_in was None, is loss)" in output


def test_a_changed_stage_and_later_stages_run_again(train):
    train("name=x")
    before = record("x", "sft")["produced"]["model"]
    _, output = train("name=x", "sft.lr=5e-5")
    assert "sft: runs again (sft.lr was 2e-05, is 5e-05); its old folder is now runs/x/sft.1" in output
    assert "reward: runs again (its sft model changed)" in output
    assert "ppo: runs again (its actor model changed" in output
    assert record("x", "sft")["produced"]["model"] != before
    assert (Path("runs/x/sft.1/model/config.json")).exists()
    train("name=x", "sft.lr=6e-5")
    assert sorted(path.name for path in Path("runs/x").glob("sft*")) == ["sft", "sft.1", "sft.2"]


def test_a_command_may_name_what_auto_selected(train):
    train("name=x")
    named = ("name=x", "engine.dtype=bf16", "model.attention=eager", "reward.init=sft")
    for stage in ("sft", "reward", "ppo"):
        plan = {"auto": {"engine.dtype": "bf16", "model.attention": "eager"}}
        (Path("runs/x") / stage / "plan.json").write_text(json.dumps(plan))
    assert train(*named)[1].count("skipped") == 3
    output = train(*named, "engine.dtype=fp32")[1]
    assert "sft: runs again (engine.dtype was bf16, is fp32); its old folder" in output
    assert "sft: runs/x/sft.1 has these inputs" in train("name=x")[1]
    assert "reward: runs again (reward.init was sft, is base; its base model" in train("name=x", "reward.init=base")[1]


def test_results_of_earlier_inputs_are_used_again(train):
    """A forgotten override must not cost the stages that it made run again."""
    words = ("name=x", "sft.lr=5e-5")
    train(*words)
    Path("runs/x/tokenizer").mkdir()
    Path("runs/x/tokenizer/made").write_text("by the first")
    before = {stage: record("x", stage) for stage in ("sft", "reward", "ppo")}
    assert train("name=x")[1].count("runs again") == 3
    Path("runs/x/tokenizer").mkdir()
    Path("runs/x/tokenizer/made").write_text("by the second")
    Path("runs/x/report.html").write_text("of the second")
    _, output = train(*words)
    assert Path("runs/x/report.html").read_text() != "of the second"
    assert "sft: runs/x/sft.1 has these inputs and is runs/x/sft again" in output
    assert "sft: changes (sft.lr was 2e-05, is 5e-05); its old folder is now runs/x/sft.2" in output
    assert output.count("skipped") == 3 and {stage: record("x", stage) for stage in before} == before
    assert Path("runs/x/tokenizer/made").read_text() == "by the first"
    assert not list(Path("runs/x/sft").glob("record.json")) and Path("runs/x/sft.2/tokenizer/made").exists()
    assert train("name=x")[1].count("skipped") == 3 and train(*words)[1].count("skipped") == 3


def test_the_curves_of_tensorboard_are_those_of_the_folder(train):
    """They are outside of the folder, and the writer of a stage replaces earlier ones."""
    words, curves = ("name=x", "stage=sft", "sft.lr=5e-5"), Path("runs/x/tensorboard/sft/events")
    train(*words)
    curves.parent.mkdir(parents=True)
    curves.write_text("of the first")
    train("name=x", "stage=sft")
    assert not curves.exists()
    curves.parent.mkdir(parents=True)
    curves.write_text("of the second")
    train(*words)
    assert curves.read_text() == "of the first" and not Path("runs/x/sft/tensorboard").exists()
    assert Path("runs/x/sft.2/tensorboard/events").read_text() == "of the second"


def test_an_unfinished_stage_of_earlier_inputs_resumes(train):
    train("name=x", "stage=sft", "sft.lr=5e-5", stage="crash")
    (Path("runs/x/sft/checkpoints/step-8")).mkdir(parents=True)
    train("name=x", "stage=sft")
    _, output = train("name=x", "stage=sft", "sft.lr=5e-5")
    assert "sft: runs/x/sft.1 has these inputs" in output and "sft: resumes" in output
    assert Path("runs/x/sft/checkpoints/step-8").exists() and record("x", "sft")["status"] == "finished"


@pytest.mark.parametrize("step", ["record", "tokenizer", "rename"])
def test_a_kill_while_a_folder_is_renamed_loses_no_result(train_here, step, monkeypatch):
    """At the given step of setting the first folder aside, or of restoring it, the launcher is killed."""
    words = ("name=x", "stage=sft", "sft.lr=5e-5")
    train_here(*words)
    Path("runs/x/tokenizer").mkdir()
    original = Path.rename

    def killed(path: Path, target: Path) -> Path:
        is_tokenizer = path.name == "tokenizer"
        if step == "rename" and not is_tokenizer:
            raise KeyboardInterrupt
        result = original(path, target)
        if step == ("tokenizer" if is_tokenizer else "record"):
            raise KeyboardInterrupt
        return result

    for command in (("name=x", "stage=sft"), words):
        monkeypatch.setattr(Path, "rename", killed)
        train_here(*command)
        monkeypatch.setattr(Path, "rename", original)
        assert "skipped" in train_here(*words)[1]
        assert Path("runs/x/tokenizer").exists() and not Path("runs/x/sft/tokenizer").exists()
        train_here("name=x", "stage=sft")


@pytest.mark.parametrize("moment", ["set aside", "restored"])
def test_a_kill_loses_no_checkpoints_of_an_unfinished_stage(train_here, moment, monkeypatch):
    """The launcher is killed after it has set the folder aside, or before the folder gets its name back."""
    words, other = ("name=x", "stage=sft", "sft.lr=5e-5"), ("name=x", "stage=sft")
    train_here(*words, stage="crash")
    Path("runs/x/sft/checkpoints/step-8").mkdir(parents=True)
    if moment == "restored":
        train_here(*other)
        shutil.rmtree("runs/x/sft")
    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "rename") if moment == "restored" else (Manifest, "begin")), raise_interrupt)
        train_here(*(words if moment == "restored" else other))
    assert not Path("runs/x/sft").exists()
    assert "sft: runs/x/sft.1 has these inputs" in train_here(*words)[1]
    assert Path("runs/x/sft/checkpoints/step-8").exists()


def test_a_later_stage_gets_the_tokenizer_back_after_a_kill(train_here, monkeypatch):
    train_here("name=x", "stage=sft")
    Path("runs/x/tokenizer").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.launch.manifest.move_aside", raise_interrupt)
        train_here("name=x", "stage=sft", "sft.lr=5e-5")
    assert Path("runs/x/sft/tokenizer").exists()
    train_here("name=x", "stage=reward", "reward.init=base")
    assert Path("runs/x/tokenizer").exists() and not Path("runs/x/sft/tokenizer").exists()


def test_the_report_is_written_after_a_kill(train_here, monkeypatch):
    words = ("name=x", "stage=sft", "sft.lr=5e-5")
    train_here(*words)
    train_here("name=x", "stage=sft")
    Path("runs/x/report.html").write_text("of the second")
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.launch.command.report_verdict", raise_interrupt)
        train_here(*words)
    train_here(*words)
    new = Path("runs/x/report.html")
    assert new.read_text() != "of the second"
    written = new.stat().st_mtime_ns
    train_here(*words)
    assert new.stat().st_mtime_ns == written


def raise_interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="needs a second disk")
def test_a_stage_on_another_disk(train):
    words, other, folder = ("name=x", "stage=sft", "sft.lr=5e-5"), ("name=x", "stage=sft"), Path("runs/x/sft")
    train(*words)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        target = Path(shutil.move(folder, disk))
        folder.symlink_to(target)
        Path("runs/x/tokenizer").mkdir()
        assert train(*other)[0] == 0 and Path("runs/x/sft.1").is_symlink()
        assert "sft: runs/x/sft.1 has these inputs" in train(*words)[1]
        target.rename(f"{target}.gone")
        status, output = train(*words)
        assert status == 2 and f"error: runs/x/sft is a link to {target}, which is missing: restore that" in output
        assert folder.is_symlink()


def test_changed_data_runs_again_with_a_new_tokenizer(train):
    Path("a.jsonl").write_text('{"prompt": "1"}\n')
    words = ("name=x", "data.path=a.jsonl", "stage=sft")
    train(*words, stage="crash")
    Path("runs/x/tokenizer").mkdir()
    train(*words)
    assert Path("runs/x/tokenizer").exists()  # of the stage that resumed
    Path("a.jsonl").write_text('{"prompt": "2"}\n')
    _, output = train(*words)
    assert "sft: runs again (the data changed)" in output
    assert [str(path) for path in Path("runs/x").glob("**/tokenizer")] == ["runs/x/sft.1/tokenizer"]


def test_files_that_exchange_their_contents_are_other_data(train):
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')
    words = ("name=x", "data.sources=[{path: a.jsonl, eval_path: b.jsonl}]", "stage=sft")
    train(*words)
    for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
        Path(f"{old}.jsonl").rename(f"{new}.jsonl")
    assert "sft: runs again (the data changed)" in train(*words)[1]


def test_a_missing_model_is_exported_again_from_the_newest_checkpoint(train):
    train("name=x")
    models = record("x", "sft")["produced"]
    (Path("runs/x/sft/checkpoints/step-8")).mkdir(parents=True)
    shutil.rmtree("runs/x/sft/model")
    for stage in ("reward", "ppo"):
        status, output = train("name=x", f"stage={stage}")
        assert (
            status == 2 and "runs/x/sft/model is missing, although the sft stage has finished: run stage=sft" in output
        )
    status, output = train("name=x")
    assert (status, output.count("skipped")) == (0, 2)
    assert "sft: resumes, 1 process (its model is gone; it is exported again from the newest checkpoint)" in output
    assert record("x", "sft")["produced"] == models and not Path("runs/x/sft.1").exists()
    shutil.rmtree("runs/x/sft/model")
    shutil.rmtree("runs/x/sft/checkpoints")
    _, output = train("name=x")
    assert "sft: runs again (its model and its checkpoints are gone); its old folder is now runs/x/sft.1" in output


def test_changed_bytes_of_a_finished_model_are_detected(train, tmp_path):
    """A disk may change bytes without changing size and time. A process reads a file once, so another one notices."""
    train("name=x")
    file = Path("runs/x/sft/model/config.json")
    before = file.stat()
    file.write_text(file.read_text().replace("lr", "rl"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    words = [*BASE, "name=x", "ppo.lr=3e-5"]
    another = Worker(launch, tmp_path, words, FAKE_STAGES, environment={})
    output, _ = another.communicate()
    assert another.returncode == 2 and "runs/x/sft/model is not as the sft stage made it" in output
    assert record("x", "ppo")["status"] == "finished" and not Path("runs/x/ppo.1").exists()


def local_model(folder: str) -> str:
    """Write the model files that the launcher reads, and return the override that selects the model."""
    Path(folder).mkdir()
    (Path(folder) / "config.json").write_text(json.dumps({"name": folder}))
    for name in ("model.safetensors", "tokenizer.json"):
        (Path(folder) / name).write_text(f"{name} of {folder}")
    return f"model.path={folder}"


@pytest.mark.parametrize("changed", [("m/tokenizer.json", "m/model.safetensors"), ("t/tokenizer.json", "t.jinja")])
def test_changed_files_of_a_model_repeat_the_stage(train, changed):
    """New weights are never used with an old tokenizer."""
    words = ["name=x", "stage=sft", local_model("m")]
    if "t.jinja" in changed:
        local_model("t")
        Path("t.jinja").write_text("{{ messages }}")
        words += ["model.tokenizer=t", "model.chat_template=t.jinja"]
    train(*words)
    for number, file in enumerate(map(Path, changed), start=1):
        Path("runs/x/tokenizer").mkdir()
        assert train(*words)[1].count("skipped") == 1
        file.write_text(file.read_text() + " 2")
        _, output = train(*words)
        reason = "its base model changed" if file.name == "model.safetensors" else "the tokenizer's files changed"
        assert f"sft: runs again ({reason}" in output and f"runs/x/sft.{number}" in output
        assert not Path("runs/x/tokenizer").exists() and Path(f"runs/x/sft.{number}/tokenizer").exists()
    assert train(*words)[1].count("skipped") == 1


def test_a_reward_model_from_the_base_model_needs_the_tokenizer_of_the_same_files(train):
    words = ("name=x", local_model("m"), "reward.init=base")
    train(*words, "stage=sft")
    assert train(*words, "stage=reward")[0] == 0
    Path("m/tokenizer.json").write_text("another")
    status, output = train(*words, "stage=reward")
    assert status == 2 and "changed since the sft stage made runs/x/tokenizer: run stage=sft" in output
    status, output = train(*words)
    assert status == 0 and "sft: runs again" in output and "reward: runs again" in output


def test_without_manifest_the_reward_model_starts_from_the_same_model(train):
    train("name=x")
    Path("runs/x/manifest.json").unlink()
    Path("runs/x/tokenizer").mkdir()
    status, output = train("name=x", "stage=reward")
    assert status == 2 and "runs/x/sft/model exists, but runs/x/manifest.json has no record of the sft stage" in output
    assert train("name=x", "stage=reward", "reward.init=base")[0] == 0
    # The tokenizer of unknown files.
    assert [str(path) for path in Path("runs/x").glob("**/tokenizer")] == ["runs/x/reward.1/tokenizer"]
    assert "sft: runs again (its record is gone)" in train("name=x")[1]


def test_the_evaluations_that_the_guard_reads_are_inputs_of_an_unfinished_ppo(train):
    """They determine when the guard stops and which step is the best. A finished stage has used them already."""
    Path("mine.py").write_text("def grade(answer, row): return 1.0")
    words = ("name=x", "stage=ppo", "actor=m", "reward=m")
    local_model("m")
    train(*words, stage="crash")
    output = train(*words, "evaluation.judge=mine.py:grade", stage="crash")[1]
    assert "ppo: runs again (evaluation.judge was None, is" in output
    assert "ppo: resumes" in train(*words, "evaluation.judge=mine.py:grade", stage="crash")[1]
    with open("mine.py", "a") as file:
        file.write("\n# changed")
    assert "ppo: runs again (the judge's file changed)" in train(*words, "evaluation.judge=mine.py:grade")[1]
    assert "ppo: finished before" in train(*words)[1]


@pytest.mark.parametrize(
    "key",
    ["evaluation.judge=a.py:b", "evaluation.prompts=9", "evaluation.temperatures=[1]", "ppo.eval_every=3"],
)
def test_evaluations_are_settings_if_guard_or_export_read_them(key):
    def settings(*more: str) -> dict:
        return stage_settings(config_of(*BASE, *more), "ppo")

    for reads in ("ppo.guard=stop", "ppo.guard=rollback"):
        assert settings(reads, key) != settings(reads)
    best = ("ppo.guard=off", "ppo.export=best", "ppo.eval_every=2")
    assert settings(*best, key) != settings(*best) and settings(*best)["ppo.eval_every"] == 2
    for watches in ("ppo.guard=off", "ppo.guard=warn"):
        assert settings(watches, key) == settings(watches)


def test_unfinished_files_of_a_killed_process_are_removed(train):
    train("name=x", "stage=sft")
    parts = [Path("runs/x/.manifest.json.1.part"), Path("runs/x/sft/.summary.json.12.part")]
    for part in parts:
        part.write_text("{")
    train("name=x", "stage=sft")
    assert not any(part.exists() for part in parts) and Path("runs/x/sft/summary.json").exists()


FUNCTION = "def score(answer, row): return {}.0"


def test_the_sft_loss_of_ppo_is_an_input(train):
    local_model("m")
    words = ("name=x", "stage=ppo", "actor=m", "reward=m", "ppo.ptx_coef=0.1", "sft.max_length=512")
    train(*words)
    assert "ppo: runs again (sft.loss_on was assistant, is all)" in train(*words, "sft.loss_on=all")[1]
    assert "ppo: runs/x/ppo.1 has these inputs and is runs/x/ppo again" in train(*words)[1]


def test_a_changed_reward_function_makes_ppo_run_again(train):
    file, words = Path("mine.py"), ("name=x", "ppo.reward_model=false", "ppo.reward_function=mine.py:score")
    file.write_text(FUNCTION.format(1))
    _, output = train(*words)
    assert "ppo: starts" in output and "reward:" not in output and not Path("runs/x/reward").exists()
    assert set(record("x", "ppo")["consumed"]["models"]) == {"actor"}
    assert train(*words)[1].count("skipped") == 2
    file.write_text(FUNCTION.format(2))
    _, output = train(*words)
    assert "ppo: runs again (the reward function's file changed); its old folder is now runs/x/ppo.1" in output
    assert output.count("skipped") == 1 and "sft: finished" in output
    Path("mine.py").rename("other.py")
    assert "ppo: runs again (ppo.reward_function was" in train(*words[:2], "ppo.reward_function=other.py:score")[1]


def test_an_unfinished_stage_resumes_in_its_folder(train):
    status, output = train("name=x", stage="crash")
    assert status == 1
    assert "sft: rank 0: RuntimeError: a bug (runs/x/sft/error.txt has the traceback" in output
    assert record("x", "sft")["status"] == "stopped"
    Path("runs/x/sft/checkpoint").touch()
    status, output = train("name=x")
    assert (status, "sft: resumes" in output) == (0, True)
    assert Path("runs/x/sft/checkpoint").exists()


def test_the_same_command_without_a_name_continues_its_run(train):
    train("stage=sft", stage="crash")
    (run,) = Path("runs").iterdir()
    status, output = train("stage=sft")
    assert (status, list(Path("runs").iterdir())) == (0, [run])
    assert f"run folder: {run} (resumes" in output
    train("stage=sft")
    assert len(list(Path("runs").iterdir())) == 2


def test_another_command_without_a_name_is_another_run(train):
    train("stage=sft", stage="crash")
    train("stage=sft", "seed=2")
    assert len(list(Path("runs").iterdir())) == 2
    assert all(run.name.startswith("gpt2-demo-") for run in Path("runs").iterdir())


def test_a_run_folder_of_another_model_or_other_data_is_refused(train):
    train("name=x", "stage=sft")
    for words, changes in {
        ("model=opt-125m",): "model.hub was openai-community/gpt2, is facebook/opt-125m. Choose another name=",
        ("data.path=a/mine.jsonl",): "data.path was None, is /.*/a/mine.jsonl; data.sources was .*demo.*, is None",
        ("data.sources=[{builtin: demo, weight: 2}]",): "data.sources was .*'weight': 2",
    }.items():
        Path("a").mkdir(exist_ok=True)
        Path("a/mine.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
        status, output = train("name=x", *words)
        assert status == 2 and re.search(f"runs/x belongs to another configuration: {changes}", output), output
    assert starts("x", "sft") == 1


def test_ppo_names_missing_models(train):
    status, output = train("name=x", "stage=ppo")
    assert status == 2
    assert "runs/x has no finished sft stage. Select a run that has one (name=, run_dir=), set actor=FOLDER" in output
    assert not Path("runs/x").exists()
    train("name=x", "stage=reward")
    status, output = train("name=x", "stage=ppo")
    assert status == 2
    assert "runs/x has no finished sft stage" in output
    assert record("x", "reward")["status"] == "finished"


def test_models_of_other_runs_can_be_given(train):
    train("name=a")
    status, _ = train("name=b", "stage=ppo", "actor=runs/a/sft", "reward=runs/a/reward")
    assert status == 0
    assert record("b", "ppo")["consumed"]["models"]["actor"] == record("a", "sft")["produced"]["model"]
    assert not Path("runs/b/sft").exists()


def test_run_dir_can_be_anywhere(train, tmp_path):
    assert train("stage=sft", f"run_dir={tmp_path}/else/where")[0] == 0
    assert (tmp_path / "else" / "where" / "sft" / "model").is_dir()


def test_every_run_of_a_multirun_has_its_folder(train):
    status, output = train("-m", "seed=1,2", "stage=sft", "name=x")
    assert status == 0
    assert sorted(run.name for run in Path("runs").iterdir()) == ["x-seed=1", "x-seed=2"]
    status, output = train("-m", "seed=1,2", "stage=sft", "name=x")
    assert output.count("skipped") == 2
    end = "-- sft of 2 runs\nseed=1  eval_loss 0.25  gold_score 0.5\nseed=2  eval_loss 0.25  gold_score 0.5\n"
    assert output.endswith(end)
    assert "-- sft of" not in train("-m", "seed=1", "stage=sft", "name=y")[1]
    x, y = Path("runs/x-seed=1"), Path("runs/x-seed=2")
    swept = {"stage=sft": ("sft", x), "stage=reward": ("reward", y)}  # each run ends with another stage
    end = "-- sft and reward of 2 runs\nstage=sft     eval_loss 0.25  gold_score 0.5\nstage=reward"
    assert compare_runs(swept) == end


def test_a_multirun_without_a_name_skips_finished_runs(train):
    train("-m", "seed=1,2", "stage=sft")
    first, second = sorted(Path("runs").iterdir())
    shutil.rmtree(second)
    shutil.rmtree(first / "sft" / "model")  # an interrupted run has no model
    (first / "sft" / "checkpoints" / "step-1").mkdir(parents=True)
    status, output = train("-m", "seed=1,2,3", "stage=sft")
    assert status == 0 and f"run folder: {first} (resumes the unfinished run" in output
    assert [run.name.split("-")[2] for run in sorted(Path("runs").iterdir())] == ["seed=1", "seed=2", "seed=3"]
    status, output = train("-m", "seed=1,2,3", "stage=sft")
    reason = "(the finished run of the same configuration; name=NAME starts another run)"
    assert output.count(reason) == output.count("skipped") == 3
    assert len(list(Path("runs").iterdir())) == 3
    train("seed=1", "stage=sft")  # a single command starts a new run
    assert len(list(Path("runs").iterdir())) == 4


def test_a_failed_run_of_a_multirun_does_not_stop_the_others(train):
    status, output = train("-m", "seed=1,2", "stage=sft", stage="user")
    assert status == 2
    assert not list(Path("runs").iterdir())  # no run folder was created
    assert (
        "2 of 2 runs failed: seed=1; seed=2" in output
        and "-- sft of 2 runs\nseed=1  failed\nseed=2  failed\n" in output
    )


def test_a_disk_error_in_one_run_of_a_multirun_does_not_stop_the_others(train_here, monkeypatch):
    def refuse_first(config, stages, label):
        if label == "seed=1":
            raise PermissionError(13, "Permission denied", "runs")
        return open_folder(config, stages, label)

    monkeypatch.setattr("pipeline.launch.command.open_folder", refuse_first)
    status, output = train_here("-m", "seed=1,2", "stage=sft")
    assert status == 2 and "error: no permission ([Errno 13] Permission denied: 'runs'): change" in output
    assert "seed=1  failed\nseed=2  eval_loss" in output and "1 of 2 runs failed: seed=1" in output


def lock_and_die(folder: Path) -> None:
    _held = _lock(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_ends_with_its_process(tmp_path):
    locked = Worker(lock_and_die, tmp_path, environment={})
    locked.communicate()
    assert locked.returncode == -signal.SIGKILL
    config = config_of(*BASE, f"run_dir={tmp_path}")
    open_folder(config, ["sft"]).close()


def test_a_full_disk_is_one_message(train_here, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "stop", full)
        status, output = train_here("name=x", "stage=sft", stage="user")
    assert (status, output.count("error: ")) == (2, 1)  # only the first error
    monkeypatch.setattr("pipeline.files.os.fsync", full)
    status, output = train_here("name=x", "stage=sft")
    assert status == 2
    assert "the disk is full" in output and "Traceback" not in output
    status, output = train_here("name=x", "stage=sft", "debug=true")
    assert status == 2 and output.index("Traceback") < output.index("error: the disk is full")
    Path("runs/mine").mkdir()
    train_here("name=mine", "stage=sft")
    assert [path.name for path in Path("runs").iterdir()] == ["mine"]  # existing files remain


def test_a_data_file_without_permission_is_one_message(train_here, monkeypatch):
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pipeline.launch.fingerprint.hash_file", refuse)  # root may read every file
    Path("mine.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    status, output = train_here("stage=sft", "data.path=mine.jsonl")
    assert status == 2 and "error: no permission ([Errno 13] Permission denied: 'mine.jsonl'): change" in output


def test_a_damaged_manifest_is_one_message(train):
    train("name=x", "stage=sft")
    for content in (
        "{", "[]", "1", '{"identity": [], "asked": "", "stages": {}}', '{"identity": {}, "asked": 3, "stages": {}}',
        '{"identity": {}, "asked": "", "stages": {"sft": 1}}',
        '{"identity": {}, "asked": "", "stages": {"sft": {"status": "finished", "consumed": {"settings": []}}}}',
    ):  # fmt: skip
        Path("runs/x/manifest.json").write_text(content)
        status, output = train("name=x", "stage=sft")
        lines = [line for line in output.splitlines() if not line.startswith("recipe=")]
        assert status == 2 and "manifest.json cannot be read" in lines[-1] and len(lines) <= 2, content
        assert Path("runs/x/sft/model").exists()


def test_the_reward_model_starts_from_the_configured_model(train):
    train("name=x", "stage=sft")

    def start(*more: str) -> dict:
        return stage_inputs(config_of(*BASE, *more), Manifest.read(Path("runs/x")), "reward")

    assert start() == {"sft": Path("runs/x/sft/model")}
    assert start("reward.init=base") == {"base": None}
    assert start("reward_model=opt-125m") == {"base": None}


def test_only_keys_that_change_results_are_settings():
    def settings(*more: str) -> dict:
        return stage_settings(config_of(*BASE, "ppo.reward_function=mine.py:score", *more), "ppo")

    how = ("ranks=2", "engine.zero_stage=3", "rollout.batch_size=8", "rollout.keep=false", "rollout.cache_bytes=9")
    how += ("ppo.actor_engine.offload_optimizer=cpu", "ppo.reference=true", "ppo.reward_threads=4")
    watching = ("ppo.save_every=3", "tracking.project=x", "name=y", "sft.lr=1")
    plain = settings()
    assert settings(*how, *watching) == plain
    other = ("seed=2", "ppo.lr=1", "engine.dtype=fp32", "rollout.temperature=0.5", "data.eval_fraction=0.1")
    other += ("model.thinking=true",)
    assert all(settings(override) != plain for override in (*other, "ppo.actor_engine.dtype=fp32"))


def test_folder_hashes_depend_on_names_and_contents(tmp_path):
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("1")
    (folder / "sub" / "b").write_text("2")
    first = hash_tree(folder)
    (folder / ".hidden").write_text("3")
    assert hash_tree(folder) == first
    (folder / "sub" / "b").write_text("22")
    second = hash_tree(folder)
    (folder / "a").rename(folder / "c")
    assert len({first, second, hash_tree(folder)}) == 3


def test_only_the_model_of_a_stage_folder_is_an_input(tmp_path):
    """The checkpoints of the stage may be deleted, and the stage may be evaluated again."""
    (tmp_path / "sft" / "model").mkdir(parents=True)
    (tmp_path / "sft" / "model" / "config.json").write_text("{}")
    model = config_of(*BASE[1:], f"model.path={tmp_path}/sft").model
    before = model_content(model)
    (tmp_path / "sft" / "samples.jsonl").write_text("{}\n")
    assert model_content(model) == before
    (tmp_path / "sft" / "model" / "config.json").write_text("{ }")
    assert model_content(model) != before
