"""The modules that a rank imports before its first step, and how commands end early."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.installation import require_packages
from tests.tiny import ROOT

LATER = {"peft", "datasets", "pyarrow", "pandas", "wandb", "hydra", "omegaconf"}


def test_a_stage_imports_only_libraries_of_its_first_step() -> None:
    code = "import sys, step1_sft.train, step3_ppo.train; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages = {name.split(".")[0] for name in shown.split()}
    assert "transformers" in packages
    assert not LATER & packages
    assert "pipeline.launch.manifest" not in shown.split()  # only the launcher reads the manifest


@pytest.mark.parametrize("command", [["train.py"], ["chat.py", "runs/x"]])
def test_missing_packages_are_one_line(command: list[str]) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(  # -S: without site-packages
        [sys.executable, "-S", *command], cwd=ROOT, env=bare, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 1 and shown.stderr.count("\n") == 1
    assert shown.stderr.startswith("error: torch, transformers, hydra, pydantic, yaml, numpy can't be imported by ")


def test_commands_in_messages_work_in_the_current_folder(tmp_path: Path) -> None:
    code = "from pipeline.installation import CHAT, REPORT; print(CHAT, REPORT, sep='|')"
    for folder, scripts in ((ROOT, ""), (tmp_path, f"{ROOT}/")):
        command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
        shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
        assert shown == f"python {scripts}chat.py|python {scripts}zerochat.py report\n"


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="error: zerochat does not run on Windows: install Linux with `wsl --install`"):
        require_packages()


def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    code = """
import signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "pipeline.doctor.command":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore Ctrl-C in commands that end with &
import zerochat
sys.exit(zerochat.main(["doctor"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_command_whose_reader_has_ended_prints_no_error() -> None:
    code = "import sys; from pipeline.errors import exit_status; sys.exit(exit_status(lambda: print('x') or 0))"
    command = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    _, errors = command.communicate()
    assert (command.returncode, errors) == (1, "")
