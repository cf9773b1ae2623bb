"""What a rank imports before its first step, and how Python's cycle collector is kept off it."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline.imports import kept_for_good
from tests.tiny import ROOT

LATER = {"peft", "datasets", "pyarrow", "pandas", "wandb", "hydra", "omegaconf"}


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    if not was_on:
        gc.disable()


def test_what_is_made_inside_is_kept_from_the_collector_and_what_comes_later_is_not() -> None:
    with kept_for_good():
        assert not gc.isenabled()
        inside = [[n] for n in range(50)]
    later: list[list[int]] = [[0]]
    assert gc.isenabled()
    walked = {id(thing) for thing in gc.get_objects()}  # without the frozen ones
    assert id(later) in walked
    assert not walked & {id(thing) for thing in (inside, *inside)}


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), kept_for_good():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with kept_for_good():
        pass
    assert not gc.isenabled()


def test_a_stage_imports_no_library_that_its_first_step_can_do_without() -> None:
    code = "import sys, step1_sft.train, step3_ppo.train; print(*{name.split('.')[0] for name in sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "transformers" in shown.split()
    assert not LATER & set(shown.split())


@pytest.mark.parametrize("command", [["train.py"], ["chat.py", "runs/x"]])
def test_a_python_without_the_packages_is_told_in_a_line(command: list[str]) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(  # -S: without site-packages
        [sys.executable, "-S", *command], cwd=ROOT, env=bare, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 1 and shown.stderr.count("\n") == 1
    assert shown.stderr.startswith("error: torch, transformers, hydra, pydantic, yaml, numpy can't be imported by ")
