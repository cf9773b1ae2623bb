"""A case of the campaign of inputs: a command in a folder with prepared files, and how the command must end."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked_launch import launch
from tests.ranks import Worker

SECONDS = 240  # for a case, on a busy machine; most take one
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LONGEST_MESSAGE = 2500  # characters
ARCHITECTURE = (
    "{model_type:llama,hidden_size:32,num_hidden_layers:2,intermediate_size:48,vocab_size:300,num_attention_heads:4,"
    "num_key_value_heads:2,max_position_embeddings:256}"
)
FEW_TOKENS = ("rollout.max_new_tokens=4", "rollout.max_prompt_tokens=64")
SHORT = ("tracking=none", "evaluation.prompts=2", "evaluation.best_of=1", *FEW_TOKENS)
RANDOM = ("model.name=tiny", "model.weights=random", f"model.architecture={ARCHITECTURE}")
TINY = (*RANDOM, "model.tokenizer=train", *SHORT)
"""A model that trains in seconds."""
SFT = ("stage=sft", "sft.steps=1", "sft.batch_size=2", "sft.max_length=64", "name=x")
REWARD = ("stage=reward", "reward.steps=1", "reward.batch_size=2", "reward.max_length=64", "name=x")
PPO = ("ppo.steps=1", "ppo.batch_size=2", "ppo.max_length=128", "ppo.update_epochs=1")
COMPUTED = ("model", "checkpoints", "tokenizer")
"""The folders of a run that no bad input may damage. A stage that runs again renames them."""


@dataclass(frozen=True)
class Case:
    """One command with an input.

    part, name: identify the case in the report
    arguments: the command line
    says: a regular expression that the output must contain
    status: the exit status: 2 for a mistake of the user, 1 for a stage that a user's code ended, 0 if the input is
        legal
    prepare: writes the input into the current folder
    needs: the fixtures that `prepare` reads, which are copied into the current folder: "model", "reward", "run"
    environment: additional variables
    """

    part: str
    name: str
    arguments: tuple[str, ...]
    says: str = ""
    status: int = 2
    prepare: Callable[[], None] = lambda: None
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def run_case(case: Case, fixtures: Path) -> list[str]:
    """Run a case in the folder in which the fixtures were made, and return its faults; an empty list without faults."""
    with inside_new(fixtures / "work"):
        for each in case.needs:
            source = fixtures / each
            shutil.copytree(source, "runs" if each == "run" else each, symlinks=True)
        case.prepare()
        before = computed(Path("runs"))
        process = Worker(launch, Path.cwd(), [*case.arguments], {}, environment=case.environment)
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except AssertionError:
            return [f"does not end within {SECONDS} s"]
        lost = before - computed(Path("runs"))
        return faults_of(case, process.returncode, output) + ([f"lost {len(lost)} computed files"] if lost else [])


def faults_of(case: Case, status: int | None, output: str) -> list[str]:
    """Return what is wrong with the end of a command."""
    faults = []
    if status != case.status:
        faults.append(f"exit status {status}, not {case.status}")
    if "Traceback (most recent call last)" in output:
        faults.append("a traceback")
    if not re.search(case.says, output, re.DOTALL):
        faults.append(f"does not say {case.says!r}")
    errors = len(re.findall(r"^error: ", output, re.MULTILINE))
    if errors != (status != 0):
        faults.append(f"{errors} error messages")
    message = output[output.rfind("error: ") :] if errors else ""
    if len(message) > LONGEST_MESSAGE:
        faults.append(f"a message of {len(message)} characters")
    if CONTROL.search(output):
        faults.append("control characters in the output")
    return [f"{fault}: {output[-600:].strip()!r}" for fault in faults[:1]] + faults[1:]


def computed(runs: Path) -> set[tuple[str, str]]:
    """Return (name, hash) of each file that stages computed."""
    files = (file for folder in COMPUTED for file in runs.glob(f"*/**/{folder}*/**/*") if file.is_file())
    return {(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}


@contextmanager
def inside_new(folder: Path) -> Iterator[None]:
    """Make a folder the current one, and remove it at the end. A run records absolute paths, so its folder is fixed."""
    earlier = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(earlier)
        shutil.rmtree(folder)
