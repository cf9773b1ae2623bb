"""Data sets of the hub: the real client with a hub on loopback, with a cache, and without a connection."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand_in_hub import StandInHub, card, parquet, serve, ultrafeedback

ROOT = Path(__file__).parents[3]
SECONDS = 240  # limit of one process
COMMANDS = """
import contextlib, io, json, sys
from pipeline.config.check import validate
from pipeline.config.compose import compose
from pipeline.config.check_machine import hub_data
from pipeline.data.load import load_stage
from pipeline.errors import UserError
results = []
for words in json.loads(sys.argv[1]):
    config, status = validate(compose(words)), 0
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            print(*hub_data(config), sep="\\n")
            for stage in ("sft", "reward", "ppo"):
                records = load_stage(config.data, stage, 1)
                print(stage, type(records.train[0]).__name__, len(records.train), len(records.held_out))
        except UserError as problem:
            print(problem)
            status = 2
    results.append((status, output.getvalue()))
print(json.dumps(results))
"""
PREFERENCES = ["model=opt-1.3b"]
NOTHING = ["model=opt-1.3b", "data.sources=[{hub: me/nothing}]"]
NO_SUBSET = ["model=opt-1.3b", "data.sources=[{hub: me/two}]"]
NO_SPLIT = ["model=opt-1.3b", "data.sources=[{hub: me/two, subset: main, split: validation}]"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInHub]:
    data = {"HuggingFaceH4/ultrafeedback_binarized": ultrafeedback(1000, 7), "me/two": two_configurations()}
    with serve(data, tmp_path_factory.mktemp("cache")) as server:
        yield server


@pytest.fixture(scope="module")
def online(hub: StandInHub) -> list[tuple[int, str]]:
    """The results of commands in a process that reaches the hub."""
    return run(hub.environment, PREFERENCES, NOTHING, NO_SUBSET, NO_SPLIT)


def two_configurations() -> dict[str, bytes]:
    names = ("main", "socratic")
    lines = ["configs:"]
    for name in names:
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}/train-*"]
    rows = parquet([{"question": f"{n}?", "answer": f"{n}."} for n in range(9)])
    return {"README.md": card(lines), **{f"{name}/train-0.parquet": rows for name in names}}


def run(environment: dict[str, str], *commands: list[str]) -> list[tuple[int, str]]:
    """Return the exit status and the output of each command. All commands run in one new process."""
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    path = {"PATH": "", "PYTHONPATH": str(ROOT), "HOME": "/nowhere"}
    result = subprocess.run(
        command, env=path | environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr
    closed = "warning: the hub does not answer (ConnectError: [Errno 111] Connection refused), so this run uses only"
    assert (closed in result.stderr) == ("127.0.0.1:9" in environment["HF_ENDPOINT"].split("/"))
    return [(status, output) for status, output in json.loads(result.stdout.splitlines()[-1])]


def test_preferences_of_the_hub_are_read_cached_and_named(hub: StandInHub, online: list[tuple[int, str]]) -> None:
    """A process without the hub reads them from the cache. The stages divide the rows."""
    status, output = online[0]
    first, *stages = output.splitlines()
    assert status == 0
    assert first == (
        "data: ultrafeedback (HuggingFaceH4/ultrafeedback_binarized), 1,000 rows and 7 held-out rows, licence mit"
    )
    rows = [line.split() for line in stages]
    assert [row[:2] for row in rows] == [["sft", "Conversation"], ["reward", "Preference"], ["ppo", "Prompt"]]
    assert sum(int(row[2]) for row in rows) == 1000 and all(row[3] == "7" for row in rows)
    offline = hub.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}  # no process listens on this port
    assert run(offline, PREFERENCES) == [online[0]]


def test_without_a_hub_two_alternatives_are_offered(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    questions = ["model=opt-1.3b", "data=gsm8k", "stage=sft"]
    (status, output), (_, subset) = run(environment, ["model=opt-1.3b", "data=ultrafeedback", "stage=all"], questions)
    assert status == 2
    assert output.startswith("HuggingFaceH4/ultrafeedback_binarized (split train_prefs) cannot be downloaded")
    assert "set data.path=FILE to your own data, or data.path=FOLDER to a copy" in output
    assert "--include '*train_prefs*' '*test_prefs*' --local-dir FOLDER" in output
    assert "--include '*main*train*' '*main*test*' --local-dir FOLDER" in subset  # and not socratic


def test_a_data_set_that_is_not_on_the_hub_is_refused(online: list[tuple[int, str]]) -> None:
    status, output = online[1]
    assert status == 2 and "me/nothing (split train) cannot be downloaded from the hub: DatasetNotFoundError" in output


def test_an_unknown_configuration_or_split_is_refused_with_those_that_exist(online: list[tuple[int, str]]) -> None:
    select = '"data.sources=[{hub: me/two, subset: NAME, split: NAME}]"'
    for (status, output), names in zip(online[2:], (["main", "socratic"], ["train"]), strict=True):
        assert status == 2 and str(names) in output and select in output
        assert "hf download" not in output
