"""The lock of a run folder, and the rows of its stages: a single stage reads all, those of one run divide them."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
import yaml

from pipeline.config.schema import DataConfig, RunConfig
from pipeline.data.load import load_stage
from pipeline.errors import UserError
from pipeline.launch.folder import open_folder, with_stage_shares
from tests.tiny import tiny_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Return a configuration with 80 conversations for all stages."""
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(80)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_config().model_copy(update={"data": DataConfig(name="chats", path=str(file))})


def record(run_dir: Path, stage: str, config: RunConfig) -> None:
    (run_dir / stage).mkdir(parents=True)
    (run_dir / stage / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def test_a_single_stage_reads_every_row_that_is_not_held_out(config: RunConfig, tmp_path: Path) -> None:
    single = with_stage_shares(config, tmp_path / "run", ["sft"])
    records = load_stage(single.data, "sft", seed=1)
    assert len(records.train) + len(records.held_out) == 80 and not records.skipped
    assert len(load_stage(config.data, "sft", seed=1).train) < 40
    assert with_stage_shares(config, tmp_path / "run", ["sft", "ppo"]).data.stage_shares == {"sft": 0.2, "ppo": 0.4}
    assert with_stage_shares(config, tmp_path / "run", ["dpo"]).data.stage_shares == {"reward": 0.4, "ppo": 0.4}


def test_shares_of_the_user_are_used(config: RunConfig, tmp_path: Path) -> None:
    own = config.data.model_copy(update={"stage_shares": {"sft": 0.5, "ppo": 0.5}})
    config = config.model_copy(update={"data": own})
    assert with_stage_shares(config, tmp_path / "run", ["sft"]) is config


def test_a_run_of_all_stages_without_the_key_has_the_default_shares(config: RunConfig, tmp_path: Path) -> None:
    """An earlier command with the same run folder set others. To remove a key is to change it."""
    other = config.data.model_copy(update={"stage_shares": {"sft": 0.6, "reward": 0.2, "ppo": 0.2}})
    record(tmp_path / "run", "sft", config.model_copy(update={"data": other}))
    assert with_stage_shares(config, tmp_path / "run", ["sft", "reward", "ppo"]) is config
    assert with_stage_shares(config, tmp_path / "run", ["ppo"]).data.stage_shares == other.stage_shares


def test_a_later_stage_of_a_run_does_not_read_the_prompts_of_an_earlier_one(config: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stages = ["sft", "reward", "ppo"]
    record(run, "sft", with_stage_shares(config, run, stages))
    full = {"sft": 0.2, "reward": 0.4, "ppo": 0.4}
    assert with_stage_shares(config, run, ["ppo"]).data.stage_shares == full
    other_run = config.model_copy(update={"actor": str(run / "sft")})
    assert with_stage_shares(other_run, tmp_path / "other", ["ppo"]).data.stage_shares == full
    (run / "sft" / "model").mkdir()
    other_run = config.model_copy(update={"actor": str(run / "sft" / "model")})
    assert with_stage_shares(other_run, tmp_path / "other", ["ppo"]).data.stage_shares == full
    assert config.data.path is not None
    other_data = config.data.model_copy(update={"path": config.data.path + ".gz"})
    other_run = other_run.model_copy(update={"data": other_data})
    assert with_stage_shares(other_run, tmp_path / "other", ["ppo"]).data.stage_shares == {"ppo": 0.4}


def test_ppo_that_runs_alone_has_rows_for_its_pretraining_mix(config: RunConfig, tmp_path: Path) -> None:
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"ptx_coef": 0.1})})
    alone = with_stage_shares(config, tmp_path / "run", ["ppo"])
    conversations, prompts = (load_stage(alone.data, stage, seed=1) for stage in ("sft", "ppo"))
    assert conversations.train and prompts.train
    assert len(conversations.train) + len(prompts.train) + len(prompts.held_out) == 80


def test_generated_data_have_rows_for_each_stage_and_no_shares(tmp_path: Path) -> None:
    config = tiny_config()
    assert with_stage_shares(config, tmp_path, ["sft"]) is config


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_gives_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lustre may be mounted with noflock, and only its administrator can change that."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = tiny_config().model_copy(update={"run_dir": str(tmp_path / "run")})
    open_folder(config, ["sft"]).close()
    assert "has no locks" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config = config.model_copy(update={"run_dir": str(tmp_path / "run")})
    first = open_folder(config, ["sft"])
    with pytest.raises(UserError, match="is in use by process"):
        open_folder(config, ["sft"])
    first.close()
    open_folder(config, ["sft"]).close()


@pytest.mark.parametrize("name", ["x", None])
def test_a_file_in_place_of_the_runs_is_refused(
    name: str | None, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(UserError, match=r"cannot create the run folder runs/.*: Not a directory; set run_dir=FOLDER"):
        open_folder(config.model_copy(update={"name": name, "run_dir": None}), ["sft"])
