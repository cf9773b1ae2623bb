"""Rows of reasoning-gym tasks: with a stub of the package, and with the package if it is installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.config.schema import DataConfig, RunConfig, SourceConfig, TaskConfig
from pipeline.data.load import DataReader, load_stage
from pipeline.data.records import Conversation, Prompt
from pipeline.errors import UserError
from pipeline.evaluation.user_function import load_function
from pipeline.launch.fingerprint import stage_settings

CONF = Path(__file__).resolve().parents[3] / "conf"


class Sums:
    """A task with 100 questions. Row i depends on seed + i, as in reasoning-gym."""

    def __init__(self, seed: int, size: int, largest: int = 100) -> None:
        if largest > 100:
            raise ValueError("largest must be at most 100")
        self.seed, self.largest = seed, largest

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = (self.seed + index) * 7 % self.largest
        return {"question": f"{number} + 1 =", "answer": str(number + 1), "metadata": {"source_dataset": "sums"}}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    gym = SimpleNamespace(
        factory=SimpleNamespace(DATASETS={"sums": Sums, "letters": None}),
        create_dataset=lambda name, **options: Sums(**options),
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)


def data(**task: Any) -> DataConfig:
    task = {"name": "sums", "rows": 60, "held_out": 20, **task}
    return DataConfig(name="x", sources=[SourceConfig(builtin="tasks")], task=TaskConfig(**task))


def questions(stage: str, seed: int) -> list[str]:
    records = load_stage(data(), stage, seed=seed).train
    return [each.messages[0].content for each in records if isinstance(each, Conversation | Prompt)]


def test_no_question_is_in_two_splits_and_rows_have_the_scoring_data(package: None) -> None:
    held_out = DataReader(data(), seed=1, keeps_rows=True).held_out()
    sft, ppo = (questions(stage, seed=1) for stage in ("sft", "ppo"))
    splits = [{prompt.messages[0].content for prompt in held_out}, {*sft}, {*ppo}]
    assert len(held_out) == 20 and len(sft) == len({*sft}) > 5 and len(ppo) == len({*ppo}) > 10
    assert sum(map(len, splits)) == len(set.union(*splits)) >= 60
    row = held_out[0].row
    assert row is not None and row["metadata"] == {"source_dataset": "sums"}
    assert row["answer"] == str(int(row["question"].split()[0]) + 1)
    first = load_stage(data(), "sft", seed=1).train[0]
    assert isinstance(first, Conversation) and first.messages[1].content == str(int(first.messages[0].content[:2]) + 1)


def test_rows_depend_on_the_seed_only(package: None) -> None:
    assert questions("ppo", seed=1) == questions("ppo", seed=1)
    overlap = {*questions("ppo", seed=1)} & {*questions("ppo", seed=2)}
    assert len(overlap) < 0.8 * len(questions("ppo", seed=1))  # neighbouring seeds of the task share nearly all rows


def test_mistakes_name_the_key(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data\.task\.name=letter: .* no such task.*letters"):
        load_stage(data(name="letter"), "sft", seed=1)
    for options, reason in (({"largest": 101}, "at most 100"), ({"biggest": 9}, "unexpected keyword")):
        with pytest.raises(UserError, match=rf"data\.task\.options=.*{reason}.*Correct"):
            load_stage(data(options=options), "sft", seed=1)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"needs the package reasoning-gym: pip install '\.\[tasks\]'"):
        load_stage(data(), "sft", seed=1)
    with pytest.raises(UserError, match=r"can't be run: ModuleNotFoundError: .*: pip install '\.\[tasks\]'"):
        load_function("examples/rewards/reasoning_tasks.py:solved")


def test_the_task_is_an_input_only_of_stages_that_use_its_rows() -> None:
    model = {"name": "m", "hub": "a/b"}
    tasks = RunConfig(model=model, data=data(rows=70))  # type: ignore[arg-type]
    assert stage_settings(tasks, "sft")["data.task.rows"] == 70
    demo = RunConfig(model=model, data=DataConfig(name="d", sources=[SourceConfig(builtin="demo")]))  # type: ignore[arg-type]
    assert not any(key.startswith("data.task") for key in stage_settings(demo, "sft"))


def test_the_task_of_the_option_with_the_package() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install '.[tasks]')")
    option = yaml.safe_load((CONF / "data" / "reasoning-gym.yaml").read_text())
    option["task"] = {"rows": 64, "held_out": 16}
    prompts = DataReader(DataConfig(**option), seed=1, keeps_rows=True).held_out()
    assert len(prompts) == 16 and prompts[0].row is not None
    file = CONF.parent / "examples" / "rewards" / "reasoning_tasks.py"
    solved, score = (load_function(f"{file}:{name}") for name in ("solved", "score"))
    for prompt in prompts:
        row = prompt.row
        assert row is not None and row["metadata"]["word"] == row["answer"][::-1]
        answers = (row["answer"], f" {row['answer']}\n", f"{row['answer']}x", "", f"x{row['answer']}")
        assert [solved.score(text, row) for text in answers] == [1, 1, 0, 0, 0]
        assert score.score(row["answer"], row) == 1 and 0.5 < score.score(answers[2], row) < 1.1


def test_answers_are_never_executed(tmp_path: Path) -> None:
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install '.[tasks]')")
    score = load_function(f"{CONF.parent}/examples/rewards/reasoning_tasks.py:score")
    row = gym.create_dataset("countdown", size=1, seed=1)[0]
    attack = f"__import__('pathlib').Path('{tmp_path}/run').touch()"
    numbers = "+".join(map(str, row["metadata"]["numbers"]))
    assert score.score(row["metadata"]["expression"], row) == 1
    assert [score.score(text, row) for text in (attack, "9**9**9**9", "9* *9")] == [0, 0, 0]
    assert score.score(numbers, row) < 1 and not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="n_queens runs the answer as Python code"):
        score.score(attack, {"answer": "", "metadata": {"source_dataset": "n_queens"}})
    assert not (tmp_path / "run").exists()
