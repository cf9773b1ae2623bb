"""Data sets of the hub: the real client with a hub on loopback, with a cache, and without a connection."""

import contextlib
import io
import json
from collections.abc import Iterator
from importlib import reload

import pytest
import yaml

from pipeline.config.schema import DataConfig, SourceConfig
from tests.ranks import Worker
from tests.stand_in_hub import StandInHub, card, parquet, serve, ultrafeedback
from tests.tiny import ROOT, tiny_config

SETS = ROOT / "conf" / "data"
PREFERENCES, CONVERSATIONS, QUESTIONS = (
    DataConfig(**yaml.safe_load((SETS / f"{name}.yaml").read_text()))
    for name in ("ultrafeedback", "ultrachat", "gsm8k")
)
NOTHING, NO_SUBSET, NO_SPLIT = (
    DataConfig(name="mine", sources=[source])
    for source in (
        SourceConfig(hub="me/nothing"),
        SourceConfig(hub="me/two"),
        SourceConfig(hub="me/two", subset="main", split="validation"),
    )
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInHub]:
    data = {"HuggingFaceH4/ultrafeedback_binarized": ultrafeedback(1000, 7), "me/two": two_configurations()}
    with serve(data, tmp_path_factory.mktemp("cache")) as server:
        yield server


@pytest.fixture(scope="module")
def online(hub: StandInHub) -> list[tuple[int, str]]:
    """The results of commands in a process that reaches the hub."""
    results, errors = run(hub.environment, PREFERENCES, NOTHING, NO_SUBSET, NO_SPLIT)
    assert "the hub does not answer" not in errors
    return results


@pytest.fixture(scope="module")
def offline(hub: StandInHub, online: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The results of commands in a process that has only the cache of `online`."""
    closed = hub.environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}  # no process listens on this port
    results, errors = run(closed, PREFERENCES, CONVERSATIONS, QUESTIONS)
    assert "warning: the hub does not answer (ConnectError: [Errno 111] Connection refused), so this run" in errors
    return results


def two_configurations() -> dict[str, bytes]:
    names = ("main", "socratic")
    lines = ["configs:"]
    for name in names:
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}/train-*"]
    rows = parquet([{"question": f"{n}?", "answer": f"{n}."} for n in range(9)])
    return {"README.md": card(lines), **{f"{name}/train-0.parquet": rows for name in names}}


def run(environment: dict[str, str], *data: DataConfig) -> tuple[list[tuple[int, str]], str]:
    """Return (exit status, output) of each data set, which one process reads, and what it printed otherwise."""
    worker = Worker(read_here, data, environment=environment)
    output, _ = worker.communicate()
    assert worker.returncode == 0, output
    *others, results = output.splitlines()
    return [(status, text) for status, text in json.loads(results)], "\n".join(others)


def read_here(sets: tuple[DataConfig, ...]) -> None:
    """Read each data set as the launcher and then the stages do."""
    from huggingface_hub import constants

    reload(constants)  # reads the environment of this process

    from pipeline.config.check_machine import hub_data
    from pipeline.data.load import load_stage
    from pipeline.errors import UserError

    results = []
    for data in sets:
        config, status = tiny_config().model_copy(update={"data": data}), 0
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                print(*hub_data(config), sep="\n")
                for stage in ("sft", "reward", "ppo"):
                    records = load_stage(data, stage, 1)
                    print(stage, type(records.train[0]).__name__, len(records.train), len(records.held_out))
            except UserError as problem:
                print(problem)
                status = 2
        results.append((status, output.getvalue()))
    print(json.dumps(results))


def test_preferences_of_the_hub_are_read_cached_and_named(
    online: list[tuple[int, str]], offline: list[tuple[int, str]]
) -> None:
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
    assert offline[0] == online[0]


def test_without_a_hub_two_alternatives_are_offered(offline: list[tuple[int, str]]) -> None:
    (status, output), (_, subset) = offline[1:]
    assert status == 2
    assert output.startswith("HuggingFaceH4/ultrachat_200k (split train_sft) cannot be downloaded")
    assert "set data.path=FILE to your own data, or data.path=FOLDER to a copy" in output
    assert "--include '*train_sft*' '*test_sft*' --local-dir FOLDER" in output
    assert "--include '*main*train*' '*main*test*' --local-dir FOLDER" in subset  # and not socratic


def test_a_data_set_that_is_not_on_the_hub_is_refused(online: list[tuple[int, str]]) -> None:
    status, output = online[1]
    assert status == 2 and "me/nothing (split train) cannot be downloaded from the hub: DatasetNotFoundError" in output


def test_an_unknown_configuration_or_split_is_refused_with_those_that_exist(online: list[tuple[int, str]]) -> None:
    select = '"data.sources=[{hub: me/two, subset: NAME, split: NAME}]"'
    for (status, output), names in zip(online[2:], (["main", "socratic"], ["train"]), strict=True):
        assert status == 2 and str(names) in output and select in output
        assert "hf download" not in output
