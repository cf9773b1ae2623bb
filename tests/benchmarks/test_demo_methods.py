"""The methods on the demo: their inputs, and the figures of a made run folder."""

from pathlib import Path

import pytest

from benchmarks import demo_methods
from pipeline.config.check import validate
from pipeline.config.compose import compose
from pipeline.report.data import read_run
from tests.benchmarks.test_demo_seeds import CONFIG, rows, write_run
from tests.pipeline.report.example_runs import write_stage


@pytest.mark.parametrize(
    ("case", "stage", "key", "value"),
    [("gspo", "ppo", "ratio", "sequence"), ("rewards", "ppo", "samples", 8), ("orpo", "dpo", "lr", 2e-4)],
)
def test_the_keys_of_a_method_are_valid(case: str, stage: str, key: str, value: object, tmp_path: Path) -> None:
    function = f"{demo_methods.FOLDER}/rewards.py"
    (tmp_path / "rewards.py").write_text(demo_methods.REWARDS)
    words = [word.replace(function, f"{tmp_path}/rewards.py") for word in demo_methods.arguments(case)[2:]]
    assert getattr(getattr(validate(compose([f"stage={stage}", *words])), stage), key) == value


def test_the_figures_contain_the_means_of_the_methods_metrics(tmp_path: Path) -> None:
    demo = [{"sft": 0.0, "ppo": 0.5, "best_of": 0.5}] * 2
    write_run(tmp_path / "demo", "ppo", {1.0: demo, 0.0: [{"sft": 0.0, "ppo": 1.0}] * 2})
    lines = [{"step": 1, "replaced_prompts": 0.25, "eos_rate": 1.0}, {"step": 2, "replaced_prompts": 0.75, "kl": 3.0}]
    gold = {1.0: [{"sft": 0.0, "ppo": 0.75}] * 2, 0.0: [{"sft": 0.25, "ppo": 1.0}] * 2}
    summary = {"stage": "ppo", "steps": 2, "guard": {"findings": []}}
    own = tmp_path / "own"
    write_stage(own / "ppo", lines, summary, samples=rows("ppo", gold), config=CONFIG.format(seed=1))
    actual = demo_methods.case_result("resample", read_run(own), read_run(tmp_path / "demo"))
    assert (actual.bench, actual.case, actual.ours, actual.peer) == ("demo_methods", "resample", 0.75, 0.5)
    assert actual.detail["change_greedy"] == "+0.75 (+0.75 to +0.75)"
    assert actual.detail["logged"] == {"replaced_prompts": 0.5, "eos_rate": 1.0}
