"""User reward functions are loaded, checked and called. Each error is one message, if possible before training."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from pipeline import progress
from pipeline.config.check import warnings
from pipeline.config.check_machine import check_paths
from pipeline.config.stages import stages_to_run
from pipeline.data.encode import encoder
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.errors import UserError
from pipeline.evaluation import user_function
from pipeline.evaluation.judge import judged, load_judge
from pipeline.evaluation.user_function import JUDGE, UserFunction, load_function, try_reward
from pipeline.launch.command import main
from pipeline.progress import Progress, Row
from pipeline.stages.data import evaluation_prompts, open_data, stage_records
from tests import composed
from tests.tiny import tiny_config

ROW = {"prompt": "p" * 500, "answer": "#### 7"}


def write_function(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder}/mine.py:score"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(answer, row): return 1", r"no function score in .*mine\.py$"),
        ("score = 3", "no function score in"),
        ("def score(answer): return 1", r"can't be called like def score\(answer: str, row: dict\) -> float"),
        ("def score(answer, row, more): return 1", "can't be called like def score"),
        ("score = max", "can't be called like def score"),  # C functions may have no signature
        ("def score(prompts, completions, **others): return [1]", r"wrapper in docs/guides/from_trl\.md"),
        ("x = 1\ndef score(answer, row) return 1", "can't be run: SyntaxError in line 2"),
        ("x = 1\nimport no_such_module", r"ModuleNotFoundError: .*no_such_module.* \(line 2\): .*set PYTHONPATH to"),
        ("raise SystemExit", "can't be run: SystemExit"),
    ],
)
def test_unusable_functions_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_function(write_function(tmp_path, text))


@pytest.fixture
def default_torch() -> Iterator[Callable[[], None]]:
    def restore() -> None:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)

    yield restore
    restore()


@pytest.mark.parametrize(
    "setting", ["set_grad_enabled(False)", "set_default_dtype(torch.half)", "set_default_device('meta')"]
)
def test_settings_of_torch_that_change_training_are_refused(
    setting: str, tmp_path: Path, default_torch: Callable[[], None]
) -> None:
    with pytest.raises(UserError, match=r"mine\.py .* training too: (write|pass) "):
        load_function(write_function(tmp_path, f"import torch\ntorch.{setting}\ndef score(answer, row): return 1"))
    default_torch()
    inside = load_function(write_function(tmp_path, f"import torch\ndef score(a, row):\n torch.{setting}\n return 1"))
    with pytest.raises(UserError, match=r"training too: .* for the answer 'a'"):
        inside.score("a", {})


@pytest.mark.parametrize("where", ["mine.py", "mine.txt:score", "mine:score", "mine.py:", "mine.py:a b"])
def test_the_form_of_the_key(where: str) -> None:
    with pytest.raises(UserError, match=r"write FILE\.py:NAME"):
        load_function(where)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*none\.py"):
        load_function(f"{tmp_path}/none.py:score")


def test_the_current_text_of_the_file_is_executed(tmp_path: Path) -> None:
    """The file changes within a second to another text of the same length. No cache file is written."""
    for digit in "123":
        assert load_function(write_function(tmp_path, f"def score(answer, row): return {digit}")).score("", {}) == int(
            digit
        )
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


def test_classes_and_partial_functions_are_accepted(tmp_path: Path) -> None:
    text = (
        "from dataclasses import dataclass\nfrom functools import partial\n@dataclass\nclass Scale:\n    by: float\n"
        "    def __call__(self, answer, row): return self.by * len(answer)\nscore = Scale(2.0)\n"
        "def plain(answer, row, by): return by\nfixed = partial(plain, by=3)\n"
    )
    assert load_function(write_function(tmp_path, text)).score("abc", {}) == 6.0
    assert load_function(f"{tmp_path}/mine.py:fixed").score("abc", {}) == 3.0


@pytest.mark.parametrize(
    "text",
    [
        "from concurrent.futures import ProcessPoolExecutor\npool = ProcessPoolExecutor(1)\n"
        "def pid(): return pool.submit(os.getpid).result()\n",
        "import atexit, subprocess\nservice = subprocess.Popen(['sleep', '60'])\natexit.register(service.kill)\n"
        "def pid(): return service.pid\n",
    ],
    ids=["pool", "service"],
)
def test_the_call_in_advance_ends_the_processes_of_the_function(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the output of the command, so a pipe such as `train.py | tee log` would never end."""
    monkeypatch.setattr(user_function, "EXIT_SECONDS", 2.0)
    body = f"def score(answer, row):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(pid()))\n    return 1.0\n"
    try_reward(write_function(tmp_path, f"import os\n{text}{body}"), [ROW])
    deadline = time.monotonic() + 10.0
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def giving(value: Any, **rest: Any) -> UserFunction:
    return UserFunction("mine.py:score", Path("mine.py"), lambda answer, row: value, **rest)


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), torch.tensor(1.0), Fraction(1)])
def test_all_number_types_are_accepted(value: Any) -> None:
    actual = giving(value).score("a", ROW)
    assert actual == 1.0 and type(actual) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned NoneType, not a number"),
        ("1", "returned str, not a number"),
        ([1.0], "returned list, not a number"),
        (torch.ones(2), r"returned tensor\(\[1., 1.\]\), not a number"),
        (math.nan, "returned nan, not a finite number"),
        (-math.inf, "returned -inf, not a finite number"),
        (1e39, r"returned 1e\+39, not a finite number"),  # not finite in fp32
        pytest.param(10**400, r"returned 10+\.\.\., not a number", id="huge"),
    ],
)
def test_results_that_are_not_finite_numbers_are_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^ppo.reward_function=mine.py:score {message}"):
        giving(value).score("a", ROW)


@pytest.mark.parametrize("value", [-0.1, 1.01, math.nan])
def test_a_judge_must_return_0_to_1(value: float) -> None:
    assert [giving(number, key=JUDGE).score("a", ROW) for number in (0, 0.5, True)] == [0.0, 0.5, 1.0]
    message = f"^evaluation.judge=mine.py:score returned {value}, not a number from 0 to 1 for .* same command again"
    with pytest.raises(UserError, match=message):
        giving(value, key=JUDGE).score("a", ROW)


def test_several_rewards_by_name(tmp_path: Path) -> None:
    actual = load_function(write_function(tmp_path, "def score(answer, row): return row['value']"), threads=2)
    assert actual.map(actual.rewards, [("a", {"value": {"x": 1, "y": 2.5}}), ("b", {"value": 3})]) == [
        {"x": 1.0, "y": 2.5},
        {"function": 3.0},
    ]
    for value, message in (
        ({"x": None}, "returned NoneType, not a number"),
        ({}, "keys .* not names"),
        ({1: 2}, "not names"),
    ):
        with pytest.raises(UserError, match=message):
            actual.rewards("a", {"value": value})
    with pytest.raises(UserError, match="returned dict, not a number"):  # a judge must return one number
        replace(actual, key=JUDGE).score("a", {"value": {"x": 1.0}})


def test_an_error_names_line_answer_and_row_shortened(tmp_path: Path) -> None:
    function = load_function(
        write_function(tmp_path, "def score(answer, row):\n    return float(answer.split()[900])\n")
    )
    with pytest.raises(UserError) as caught:
        function.score("word " * 200, ROW)
    output = str(caught.value)
    assert "mine.py:score raised IndexError: list index out of range (line 2) for the answer 'word word" in output
    assert "answer: '#### 7'" in output and "prompt: 'ppp" in output and len(output) < 700
    # The message has one line.
    with pytest.raises(UserError, match=r"raised OSError: no answer from the judge \(line 2\)"):
        failing = "def score(answer, row):\n    raise OSError('no answer\\n from the judge')"
        load_function(write_function(tmp_path, failing)).score("a", ROW)
    with pytest.raises(UserError, match="raised SystemExit"):
        load_function(write_function(tmp_path, "import sys\ndef score(answer, row): sys.exit(0)")).score("a", ROW)


def test_a_call_cannot_change_the_row(tmp_path: Path) -> None:
    text = "def score(answer, row):\n    row['list'].append(1)\n    return len(row['list']) + len(row.pop('prompt'))\n"
    function, row = load_function(write_function(tmp_path, text)), {"prompt": "p", "list": []}
    assert [function.score("a", row) for _ in range(3)] == [2.0, 2.0, 2.0]
    assert row == {"prompt": "p", "list": []}


WAITING = """
import threading, time

both, late = threading.Barrier(2), threading.Event()
made = []

def together(answer, row):
    made.append(answer)
    both.wait(20)  # for another call
    return float(answer)

def failing(answer, row):
    made.append(answer)
    if answer == "0":
        late.wait(60)
    if answer not in "01":
        time.sleep(0.01)
    late.set()
    raise OSError(answer)

def here(answer, row):
    return threading.current_thread() is threading.main_thread()
"""


def test_threads_call_concurrently_and_preserve_the_order(tmp_path: Path) -> None:
    write_function(tmp_path, WAITING)
    calls = [(str(n), ROW) for n in range(8)]
    together, here = load_function(f"{tmp_path}/mine.py:together", 2), load_function(f"{tmp_path}/mine.py:here")
    assert together.map(together.score, calls) == [float(n) for n in range(8)]
    # With one thread, the calls run in the main thread.
    assert here.map(here.score, calls) == [1.0] * 8


@pytest.mark.parametrize("threads", [1, 2])
def test_each_result_counts_as_progress(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that needs minutes for an evaluation must not look like a hang."""
    row = Row()
    monkeypatch.setattr(progress, "_progress", Progress(row))
    before, seen = row.read().moves, list[int]()

    def score(answer: str, row_of_data: Any) -> float:
        seen.append(row.read().moves - before)
        return 1.0

    function = UserFunction("mine.py:score", Path("mine.py"), score, threads)
    function.map(function.score, [("answer", {})] * 6)
    assert row.read().moves - before == 6
    if threads == 1:
        assert seen == [0, 1, 2, 3, 4, 5]


def test_a_failed_call_in_threads_stops_further_calls(tmp_path: Path) -> None:
    """The second call fails while the first waits."""
    write_function(tmp_path, WAITING)
    function = load_function(f"{tmp_path}/mine.py:failing", 2)
    with pytest.raises(UserError, match=r"raised OSError: 0 .* run the same command again"):
        function.map(function.score, [(str(n), ROW) for n in range(500)])
    assert len(function.call.__globals__["made"]) < 500


def test_prompts_have_rows_only_with_a_function() -> None:
    with_rows = tiny_config(ppo={"reward_function": "mine.py:score"})
    for config, has_rows in ((tiny_config(), False), (with_rows, True)):
        records = stage_records(config, "ppo", open_data(config))
        for prompt in (*records.train[:5], *records.held_out[:5]):
            assert (prompt.row is not None) == has_rows
            assert not has_rows or prompt.row["prompt"][-1]["content"] == prompt.messages[-1].content
        assert not has_rows or records.train == stage_records(tiny_config(), "ppo", open_data(tiny_config())).train


def test_a_judge_replaces_the_gold_scorer_and_gets_held_out_rows(tmp_path: Path) -> None:
    """Encoded training prompts have no rows, because no function scores them."""
    where = write_function(tmp_path, "def score(answer, row): return len(answer) / len(row['prompt'][-1]['content'])")
    config = tiny_config(evaluation={"prompts": 8, "judge": where, "judge_threads": 2})
    tokenizer = train_tokenizer(["some words"] * 9, 300)
    prompts, judge = evaluation_prompts(config, tokenizer, open_data(config)), load_judge(config)
    assert judge is not None and judge.threads == 2 and len(prompts) == 8
    assert judged(prompts, ["abc"] * 8, judge) == [3 / len(prompt.messages[-1].content) for prompt in prompts]
    assert judged(prompts, ["abc"] * 8, None) == [0.0] * 8  # the demo's gold scorer
    assert judged([*prompts[:7], replace(prompts[7], row=None)], ["abc"] * 8, judge) is None
    items, _ = encoder(config, "ppo", tokenizer)(stage_records(config, "ppo", open_data(config)).train[:9])
    assert items and all(item.row is None for item in items)


@pytest.mark.parametrize(
    ("answers", "data"),
    [
        ({"completion": "a"}, {"stages": ["sft"]}),
        ({"chosen": "a", "rejected": "b"}, {"stages": ["reward"]}),
        ({"chosen": "a", "rejected": "b"}, {"stage_shares": {"reward": 1.0}}),  # PPO uses no row of this source
    ],
)
def test_held_out_prompts_of_every_stage_are_judged(
    answers: dict[str, str], data: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"prompt": f"q{n}?", **answers} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = {key: data.pop(key) for key in ("stages",) if key in data}
    sources = {"sources": [{"path": f"{tmp_path}/a.jsonl", **listed}], **data}
    config = tiny_config(data=sources, evaluation={"judge": "mine.py:score"}).model_copy(update={"stage": "sft"})
    tokenizer = train_tokenizer(["some words"] * 9, 300)
    prompts = evaluation_prompts(config, tokenizer, open_data(config))
    assert prompts and all(prompt.row in rows for prompt in prompts)
    assert judged(prompts, ["a"] * len(prompts), giving(1, key=JUDGE)) == [1.0] * len(prompts)


def config_of(*words: str) -> Any:
    return composed.config_of("model=gpt2", *words)


ALONE = ("ppo.reward_model=false", "ppo.reward_function=mine.py:score")


def test_with_a_function_only_there_is_no_reward_stage() -> None:
    assert stages_to_run(config_of(*ALONE)) == ["sft", "ppo"]
    assert stages_to_run(config_of(ALONE[1])) == ["sft", "reward", "ppo"]
    assert stages_to_run(config_of("stage=reward", "ppo.reward_model=false")) == ["reward"]
    assert config_of("ppo.reward_function=a folder/mine, too.py:f").ppo.reward_function == "a folder/mine, too.py:f"
    assert warnings(config_of(*ALONE, "reward_model=gpt2")) == [
        "reward_model=gpt2 is not used, because ppo.reward_model=false"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ppo.reward_model=false",), "ppo.reward_model=false needs ppo.reward_function=FILE.py:NAME, not null"),
        ((*ALONE, "evaluation.judge=./mine.py:score"), "evaluation.judge=./mine.py:score is also ppo.reward_function"),
        ((*ALONE, "reward=x/y"), "reward_path=x/y needs ppo.reward_model=true, not false"),
    ],
)
def test_contradictory_keys_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(*words)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_function_is_checked_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    where = write_function(tmp_path, "def score(answer): return 1")
    assert main(["model=gpt2", "data=demo", "tracking=none", f"ppo.reward_function={where}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: ppo.reward_function={where}: score can't be called like")
    assert not Path("runs").exists()
    check_paths(config_of("stage=sft", f"ppo.reward_function={where}"))  # this command does not run PPO
    with pytest.raises(UserError, match=f"^evaluation.judge={where}: score can't be called"):
        check_paths(config_of("stage=sft", f"evaluation.judge={where}"))
    check_paths(config_of("stage=reward", f"evaluation.judge={where}"))
