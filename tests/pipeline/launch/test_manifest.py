"""What runs, what is skipped, what goes on, what is kept: whole commands with stages that do nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config.check import validate
from pipeline.config.compose import compose
from pipeline.launch import processes
from pipeline.launch.command import main
from pipeline.launch.fingerprint import HashCache, stage_settings
from pipeline.launch.folder import open_folder
from pipeline.launch.manifest import Manifest
from pipeline.launch.stage_inputs import stage_inputs
from pipeline.launch.summary import compare_runs
from tests.forked_launch import launch
from tests.ranks import Worker

HERE = Path(__file__).resolve().parent
BASE = ["model=gpt2", "data=demo", "tracking=none"]


FAKE_STAGES = dict.fromkeys(("sft", "reward", "ppo"), "fake_stage")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Run a command line in an empty folder: (exit status, what it said)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stage: str = "ok") -> tuple[int, str]:
        environment = {"PYTHONPATH": str(HERE), "FAKE_STAGE": stage}
        launcher = Worker(launch, tmp_path, [*BASE, *arguments], FAKE_STAGES, environment=environment)
        said, _ = launcher.communicate()
        return launcher.returncode, said

    return run


@pytest.fixture
def train_here(tmp_path, monkeypatch, capsys):
    """Likewise in this process, whose functions a test can replace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(processes, "MODULES", FAKE_STAGES)

    def run(*arguments: str, stage: str = "ok") -> tuple[int, str]:
        monkeypatch.setenv("FAKE_STAGE", stage)
        status = main([*BASE, *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def starts(run_dir: str, stage: str) -> int:
    """How often a stage was brought to its end in its folder."""
    return len((Path("runs") / run_dir / stage / "starts").read_text())


def record(run_dir: str, stage: str) -> dict:
    return json.loads((Path("runs") / run_dir / "manifest.json").read_text())["stages"][stage]


def test_a_run_leaves_what_scripts_count_on(train):
    status, said = train("name=x")
    assert status == 0
    assert "sft     eval_loss 0.25  gold_score 0.5\n" in said
    assert "model   runs/x/ppo/model\n" in said
    assert "talk    python chat.py runs/x\n" in said
    for stage in ("sft", "reward", "ppo"):
        kept = yaml.safe_load((Path("runs/x") / stage / "config.yaml").read_text())
        assert (kept["name"], kept["model"]["name"]) == ("x", "gpt2")
        assert record("x", stage)["status"] == "finished"
    assert record("x", "sft")["consumed"]["models"] == {"base": "hub:openai-community/gpt2"}
    made = {stage: record("x", stage)["produced"]["model"] for stage in ("sft", "reward")}
    assert record("x", "ppo")["consumed"]["models"] == {"actor": made["sft"], "reward": made["reward"]}


def test_a_finished_stage_is_skipped(train):
    train("name=x")
    status, said = train("name=x", "sft.log_every=5", "sft.micro_batch_tokens=4096", "engine=zero3", "debug=true")
    assert status == 0
    assert said.count("skipped") == 3 and "judge" not in said
    assert starts("x", "sft") == 1
    # A judge that a finished PPO did not have is told how to come in.
    Path("mine.py").write_text("def grade(answer, row): return 1.0")
    judge = "evaluation.judge=mine.py:grade"
    said = train("name=x", judge)[1]
    assert f"ppo: finished before with the same settings, skipped; {judge} has not judged" in said
    shutil.rmtree("runs/x/ppo/model")
    Path("runs/x/ppo/checkpoints/step-1").mkdir(parents=True)
    assert "ppo: resumes" in train("name=x", judge)[1]
    assert "judge" not in train("name=x", judge)[1]
    with open("mine.py", "a") as file:
        file.write("\n# changed")
    assert f"skipped; {judge} has changed since it judged its answers: delete" in train("name=x", judge)[1]
    shutil.rmtree("runs/x/ppo/model")
    assert "the file of evaluation.judge changed; earlier grades are those of the old" in train("name=x", judge)[1]


def test_a_newer_program_leaves_finished_stages_finished(train):
    """Which has keys that the older one did not have, and knows of some that they change no result."""
    train("name=x", "sft.lr=2e-5")
    file = Path("runs/x/manifest.json")
    content = json.loads(file.read_text())
    for stage, key in (("sft", "sft.warmup"), ("reward", "reward.centering"), ("ppo", "ppo.kl_in")):
        consumed = content["stages"][stage]["consumed"]
        del consumed["settings"][key]
        consumed["settings"]["rollout.keep"] = False
        consumed["config"] = "of another program"
    file.write_text(json.dumps(content))
    _, said = train("name=x", "sft.lr=2e-5")
    assert said.count("skipped") == 3
    _, said = train("name=x", "sft.lr=2e-5", "ppo.kl_in=loss")
    assert "ppo: runs again (ppo.kl_in was None, is loss)" in said


def test_a_changed_stage_runs_again_and_so_do_those_after_it(train):
    train("name=x")
    before = record("x", "sft")["produced"]["model"]
    _, said = train("name=x", "sft.lr=5e-5")
    assert "sft: runs again (sft.lr was 2e-05, is 5e-05); its old folder is now runs/x/sft.1" in said
    assert "reward: runs again (its sft model changed)" in said
    assert "ppo: runs again (its actor model changed" in said
    assert record("x", "sft")["produced"]["model"] != before
    assert (Path("runs/x/sft.1/model/config.json")).exists()
    train("name=x", "sft.lr=6e-5")
    assert sorted(path.name for path in Path("runs/x").glob("sft*")) == ["sft", "sft.1", "sft.2"]


def test_a_change_of_one_stage_leaves_the_others(train):
    train("name=x")
    _, said = train("name=x", "ppo.kl_coef=0.2")
    assert said.count("skipped") == 2
    assert "ppo: runs again (ppo.kl_coef was 0.05, is 0.2)" in said


def test_neither_a_reference_that_is_watched_nor_threads_change_a_result(train):
    train("name=x", "ppo.kl_coef=0", "ppo.reference=true", "ppo.reward_threads=4")
    assert train("name=x", "ppo.kl_coef=0")[1].count("skipped") == 3


def test_changed_data_runs_again_with_a_new_tokenizer(train):
    Path("a.jsonl").write_text('{"prompt": "1"}\n')
    train("name=x", "data.path=a.jsonl", "stage=sft")
    Path("runs/x/tokenizer").mkdir()
    train("name=x", "data.path=a.jsonl", "stage=sft", "sft.lr=3e-5")
    assert Path("runs/x/tokenizer").exists()
    Path("a.jsonl").write_text('{"prompt": "2"}\n')
    _, said = train("name=x", "data.path=a.jsonl", "stage=sft", "sft.lr=3e-5")
    assert "sft: runs again (the data changed)" in said
    assert [path.name for path in Path("runs/x").glob("tokenizer*")] == ["tokenizer.1"]


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_another_template_makes_another_tokenizer_where_the_stages_folder_is_gone_too(train, stage):
    Path("t.jinja").write_text("")
    train("name=x", f"stage={stage}")
    Path("runs/x/tokenizer").mkdir()
    shutil.rmtree(f"runs/x/{stage}")
    train("name=x", f"stage={stage}")
    assert Path("runs/x/tokenizer").exists()
    shutil.rmtree(f"runs/x/{stage}")
    train("name=x", f"stage={stage}", "model.chat_template=t.jinja")
    assert [path.name for path in Path("runs/x").glob("tokenizer*")] == ["tokenizer.1"]


def test_a_model_that_is_gone_is_made_again_from_the_newest_checkpoint(train):
    train("name=x")
    made = record("x", "sft")["produced"]
    (Path("runs/x/sft/checkpoints/step-8")).mkdir(parents=True)
    shutil.rmtree("runs/x/sft/model")
    for stage in ("reward", "ppo"):
        status, said = train("name=x", f"stage={stage}")
        assert status == 2 and "runs/x/sft/model is missing, although the sft stage has finished: run stage=sft" in said
    status, said = train("name=x")
    assert (status, said.count("skipped")) == (0, 2)
    assert "sft: resumes, 1 process (its model is gone; it is exported again from the newest checkpoint)" in said
    assert record("x", "sft")["produced"] == made and not Path("runs/x/sft.1").exists()
    shutil.rmtree("runs/x/sft/model")
    shutil.rmtree("runs/x/sft/checkpoints")
    _, said = train("name=x")
    assert "sft: runs again (its model and its checkpoints are gone); its old folder is now runs/x/sft.1" in said


def test_a_model_that_was_damaged_is_not_gone_on_from(train):
    train("name=x")
    file = Path("runs/x/sft/model/config.json")
    file.write_text(file.read_text()[:-5])
    status, said = train("name=x")
    assert status == 2 and "runs/x/sft/model is not as the sft stage made it" in said
    assert record("x", "reward")["status"] == "finished" and not Path("runs/x/reward.1").exists()


def test_bit_rot_in_a_finished_model_is_noticed_before_the_next_stage(train):
    """A disk may change bytes without a change of size and time. A stage that is skipped reads nothing."""
    train("name=x")
    file = Path("runs/x/sft/model/config.json")
    before = file.stat()
    file.write_text(file.read_text().replace("lr", "rl"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert train("name=x")[1].count("skipped") == 3
    status, said = train("name=x", "ppo.lr=3e-5")
    assert status == 2 and "runs/x/sft/model is not as the sft stage made it" in said
    assert record("x", "ppo")["status"] == "finished" and not Path("runs/x/ppo.1").exists()


def local_model(folder: str) -> str:
    """Make a folder with what the launcher reads of a model, and return the override that selects it."""
    Path(folder).mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (Path(folder) / name).write_text(f"{name} of {folder}")
    return f"model.path={folder}"


@pytest.mark.parametrize("changed", ["m/tokenizer.json", "m/model.safetensors", "t/tokenizer.json", "t.jinja"])
def test_changed_files_of_a_model_run_again_what_depends_on_them(train, changed):
    """New weights never meet an old tokenizer."""
    words = ["name=x", local_model("m")]
    if not changed.startswith("m/"):
        local_model("t")
        Path("t.jinja").write_text("{{ messages }}")
        words += ["model.tokenizer=t", "model.chat_template=t.jinja"]
    train(*words)
    Path("runs/x/tokenizer").mkdir()
    assert train(*words)[1].count("skipped") == 3
    file = Path(changed)
    file.write_text(file.read_text() + " 2")
    _, said = train(*words)
    reason = "its base model changed" if changed == "m/model.safetensors" else "the tokenizer's files changed"
    assert f"sft: runs again ({reason}" in said and "runs/x/sft.1" in said
    assert [path.name for path in Path("runs/x").glob("tokenizer*")] == ["tokenizer.1"]
    assert train(*words)[1].count("skipped") == 3


def test_a_reward_model_from_the_base_model_needs_the_tokenizer_of_the_same_files(train):
    words = ("name=x", local_model("m"), "reward.init=base")
    train(*words, "stage=sft")
    assert train(*words, "stage=reward")[0] == 0
    Path("m/tokenizer.json").write_text("another")
    status, said = train(*words, "stage=reward")
    assert status == 2 and "changed since the sft stage made runs/x/tokenizer: run stage=sft" in said
    status, said = train(*words)
    assert status == 0 and "sft: runs again" in said and "reward: runs again" in said


def test_a_lost_manifest_does_not_change_the_model_that_the_reward_model_starts_from(train):
    train("name=x")
    Path("runs/x/manifest.json").unlink()
    Path("runs/x/tokenizer").mkdir()
    status, said = train("name=x", "stage=reward")
    assert status == 2 and "runs/x/sft/model exists, but runs/x/manifest.json has no record of the sft stage" in said
    assert train("name=x", "stage=reward", "reward.init=base")[0] == 0
    assert [path.name for path in Path("runs/x").glob("tokenizer*")] == ["tokenizer.1"]  # of unknown files
    assert "sft: runs again (its record is gone)" in train("name=x")[1]


def test_the_evaluations_that_the_guard_reads_are_inputs_of_an_unfinished_ppo(train):
    """They decide when the guard stops and which step is the best. A finished stage has used them."""
    Path("mine.py").write_text("def grade(answer, row): return 1.0")
    words = ("name=x", "stage=ppo", "actor=m", "reward=m")
    local_model("m")
    train(*words, stage="crash")
    said = train(*words, "evaluation.judge=mine.py:grade", stage="crash")[1]
    assert "ppo: runs again (evaluation.judge was None, is" in said
    assert "ppo: resumes" in train(*words, "evaluation.judge=mine.py:grade", stage="crash")[1]
    with open("mine.py", "a") as file:
        file.write("\n# changed")
    assert "ppo: runs again (the judge's file changed)" in train(*words, "evaluation.judge=mine.py:grade")[1]
    assert "ppo: finished before" in train(*words)[1]


@pytest.mark.parametrize(
    "key",
    ["evaluation.judge=a.py:b", "evaluation.prompts=9", "evaluation.temperatures=[1]", "ppo.eval_every=3"],
)
def test_evaluations_count_where_the_guard_or_the_export_reads_them(key):
    def settings(*more: str) -> dict:
        return stage_settings(validate(compose([*BASE, *more])), "ppo")

    for reads in ("ppo.guard=stop", "ppo.guard=rollback"):
        assert settings(reads, key) != settings(reads)
    best = ("ppo.guard=off", "ppo.export=best", "ppo.eval_every=2")
    assert settings(*best, key) != settings(*best)
    for watches in ("ppo.guard=off", "ppo.guard=warn"):
        assert settings(watches, key) == settings(watches)


def test_unfinished_files_of_a_killed_process_are_removed(train):
    train("name=x")
    parts = [Path("runs/x/.manifest.json.1.part"), Path("runs/x/sft/.summary.json.12.part")]
    for part in parts:
        part.write_text("{")
    train("name=x")
    assert not any(part.exists() for part in parts) and Path("runs/x/sft/summary.json").exists()


FUNCTION = "def score(answer, row): return {}.0"


def test_a_changed_reward_function_makes_ppo_run_again(train):
    file, words = Path("mine.py"), ("name=x", "ppo.reward_model=false", "ppo.reward_function=mine.py:score")
    file.write_text(FUNCTION.format(1))
    _, said = train(*words)
    assert "ppo: starts" in said and "reward:" not in said and not Path("runs/x/reward").exists()
    assert set(record("x", "ppo")["consumed"]["models"]) == {"actor"}
    assert train(*words)[1].count("skipped") == 2
    file.write_text(FUNCTION.format(2))
    _, said = train(*words)
    assert "ppo: runs again (the reward function's file changed); its old folder is now runs/x/ppo.1" in said
    assert said.count("skipped") == 1 and "sft: finished" in said
    Path("mine.py").rename("other.py")
    assert "ppo: runs again (ppo.reward_function was" in train(*words[:2], "ppo.reward_function=other.py:score")[1]


def test_an_unfinished_ppo_with_another_function_begins_anew(train):
    file, words = Path("mine.py"), ("name=x", "ppo.reward_function=mine.py:score")
    train("name=x")
    file.write_text(FUNCTION.format(1))
    assert train(*words, stage="crash")[0] == 1
    Path("runs/x/ppo/checkpoint").touch()
    assert "ppo: resumes" in train(*words, stage="crash")[1]
    assert Path("runs/x/ppo/checkpoint").exists()
    file.write_text(FUNCTION.format(2))
    assert "ppo: runs again (the reward function's file changed)" in train(*words)[1]
    assert not Path("runs/x/ppo/checkpoint").exists()


def test_an_unfinished_stage_goes_on_in_its_folder(train):
    status, said = train("name=x", stage="crash")
    assert status == 1
    assert "sft: rank 0: RuntimeError: a bug (runs/x/sft/error.txt has the traceback" in said
    assert record("x", "sft")["status"] == "stopped"
    Path("runs/x/sft/checkpoint").touch()
    status, said = train("name=x")
    assert (status, "sft: resumes" in said) == (0, True)
    assert Path("runs/x/sft/checkpoint").exists()


def test_the_same_command_without_a_name_continues_its_run(train):
    train(stage="crash")
    (run,) = Path("runs").iterdir()
    status, said = train()
    assert (status, list(Path("runs").iterdir())) == (0, [run])
    assert f"run folder: {run} (resumes" in said
    train()
    assert len(list(Path("runs").iterdir())) == 2


def test_another_command_without_a_name_is_another_run(train):
    train(stage="crash")
    train("seed=2")
    assert len(list(Path("runs").iterdir())) == 2
    assert all(run.name.startswith("gpt2-demo-") for run in Path("runs").iterdir())


def test_a_run_folder_of_another_model_is_refused(train):
    train("name=x", "stage=sft")
    status, said = train("name=x", "model=opt-125m")
    assert status == 2
    assert "runs/x belongs to another configuration: it was made with model=gpt2, not model=opt-125m" in said
    assert starts("x", "sft") == 1


def test_ppo_says_what_it_lacks(train):
    status, said = train("name=x", "stage=ppo")
    assert status == 2
    assert "a new run has no finished sft stage. Select a run that has one (name=, run_dir=), set actor=FOLDER" in said
    assert not Path("runs/x").exists()
    train("name=x", "stage=reward")
    status, said = train("name=x", "stage=ppo")
    assert status == 2
    assert "Run stage=sft (or stage=all) with the same run folder first, or set actor=FOLDER" in said
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
    status, said = train("-m", "seed=1,2", "stage=sft", "name=x")
    assert status == 0
    assert sorted(run.name for run in Path("runs").iterdir()) == ["x-seed=1", "x-seed=2"]
    status, said = train("-m", "seed=1,2", "stage=sft", "name=x")
    assert said.count("skipped") == 2
    end = "-- sft of 2 runs\nseed=1  eval_loss 0.25  gold_score 0.5\nseed=2  eval_loss 0.25  gold_score 0.5\n"
    assert said.endswith(end)
    assert "-- sft of" not in train("-m", "seed=1", "stage=sft", "name=y")[1]
    x, y = Path("runs/x-seed=1"), Path("runs/x-seed=2")
    swept = {"stage=sft": ("sft", x), "stage=reward": ("reward", y)}  # each by its own last stage
    end = "-- sft and reward of 2 runs\nstage=sft     eval_loss 0.25  gold_score 0.5\nstage=reward"
    assert compare_runs(swept) == end


def test_a_multirun_without_a_name_leaves_what_is_finished(train):
    train("-m", "seed=1,2", "stage=sft")
    first, second = sorted(Path("runs").iterdir())
    shutil.rmtree(second)
    shutil.rmtree(first / "sft" / "model")  # as a run that was stopped has none
    (first / "sft" / "checkpoints" / "step-1").mkdir(parents=True)
    status, said = train("-m", "seed=1,2,3", "stage=sft")
    assert status == 0 and f"run folder: {first} (resumes the unfinished run" in said
    assert [run.name.split("-")[2] for run in sorted(Path("runs").iterdir())] == ["seed=1", "seed=2", "seed=3"]
    status, said = train("-m", "seed=1,2,3", "stage=sft")
    assert (
        said.count("(the run is finished and stays unchanged; name=NAME starts another run)")
        == said.count("skipped")
        == 3
    )
    assert len(list(Path("runs").iterdir())) == 3
    train("seed=1", "stage=sft")  # a command of its own begins a run of its own
    assert len(list(Path("runs").iterdir())) == 4


def test_a_failed_run_of_a_multirun_does_not_stop_the_others(train):
    status, said = train("-m", "seed=1,2", "stage=sft", stage="user")
    assert status == 2
    assert not list(Path("runs").iterdir())  # nothing was done in them
    assert "2 of 2 runs failed: seed=1; seed=2" in said and "-- sft of 2 runs\nseed=1  failed\nseed=2  failed\n" in said


def test_nobody_works_in_a_locked_folder(train):
    held = open_folder(validate(compose([*BASE, "name=x"])), ["sft"])
    status, said = train("name=x")
    assert status == 2
    assert f"runs/x is in use by process {os.getpid()}" in said
    held.close()
    assert train("name=x", "stage=sft")[0] == 0


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import os; from pipeline.launch.folder import _lock; from pathlib import Path\n"
        f"lock = _lock(Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
    )
    locked = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[2], check=False)
    assert locked.returncode == -9  # it came as far as that, the lock in hand
    config = validate(compose([*BASE, f"run_dir={tmp_path}"]))
    open_folder(config, ["sft"]).close()


def test_a_full_disk_is_said(train_here, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "stop", full)
        status, said = train_here("name=x", "stage=sft", stage="user")
    assert (status, said.count("error: ")) == (2, 1)  # of what happened first
    monkeypatch.setattr("pipeline.files.os.fsync", full)
    status, said = train_here("name=x", "stage=sft")
    assert status == 2
    assert "the disk is full" in said
    Path("runs/mine").mkdir()
    train_here("name=mine", "stage=sft")
    assert [path.name for path in Path("runs").iterdir()] == ["mine"]  # what was there before stays


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "1", '{"identity": [], "asked": "", "stages": {}}',
     '{"identity": {}, "asked": "", "stages": {"sft": 1}}',
     '{"identity": {}, "asked": 3, "stages": {}}',
     '{"identity": {}, "asked": "", "stages": {"sft": {"status": "finished", "consumed": {"settings": []}}}}'],
)  # fmt: skip
def test_a_broken_manifest_is_said(train, content):
    train("name=x", "stage=sft")
    Path("runs/x/manifest.json").write_text(content)
    status, said = train("name=x", "stage=sft")
    assert status == 2
    lines = [line for line in said.splitlines() if not line.startswith("recipe=")]
    assert "manifest.json cannot be read" in lines[-1] and len(lines) <= 2
    assert Path("runs/x/sft/model").exists()


def test_reward_starts_where_it_is_told(train):
    train("name=x", "stage=sft")

    def start(*more: str) -> dict:
        return stage_inputs(validate(compose([*BASE, *more])), Path("runs/x"), "reward")

    assert start() == {"sft": Path("runs/x/sft/model")}
    assert start("reward.init=base") == {"base": None}
    assert start("reward_model=opt-125m") == {"base": None}


def test_only_what_matters_is_a_setting():
    def settings(*more: str) -> dict:
        return stage_settings(validate(compose([*BASE, *more])), "ppo")

    how = ("ranks=2", "engine.zero_stage=3", "rollout.batch_size=8", "rollout.keep=false", "rollout.cache_bytes=9")
    how += ("ppo.actor_engine.offload_optimizer=cpu",)
    watching = ("ppo.save_every=3", "tracking.project=x", "name=y", "sft.lr=1")
    plain = settings()
    assert settings(*how, *watching) == plain
    other = ("seed=2", "ppo.lr=1", "engine.dtype=fp32", "rollout.temperature=0.5", "data.eval_fraction=0.1")
    assert all(settings(override) != plain for override in (*other, "ppo.actor_engine.dtype=fp32"))


def test_folder_hashes_know_names_and_contents(tmp_path):
    folder, cache = tmp_path / "m", HashCache(tmp_path / "cache")
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("1")
    (folder / "sub" / "b").write_text("2")
    first = cache.tree(folder)
    (folder / ".hidden").write_text("3")
    assert cache.tree(folder) == first
    (folder / "sub" / "b").write_text("22")
    second = cache.tree(folder)
    (folder / "a").rename(folder / "c")
    assert len({first, second, cache.tree(folder)}) == 3
    cache.save()
    assert HashCache(tmp_path / "cache").tree(folder) == cache.tree(folder)
    for damage in ("[]", "1", '{"%s": 1}' % (folder / "c")):
        (tmp_path / "cache").write_text(damage)
        assert HashCache(tmp_path / "cache").tree(folder) == cache.tree(folder)


def test_a_manifest_is_written_whole(tmp_path, monkeypatch):
    manifest = Manifest(tmp_path)
    manifest.save()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    manifest.request = "other"
    with pytest.raises(OSError, match="power cut"):
        manifest.save()
    assert Manifest.read(tmp_path).request == ""
