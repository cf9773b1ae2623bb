"""The cases of the training guard: their inputs, and the figures of a made run folder."""

import json
from pathlib import Path

from benchmarks import guard_cases
from pipeline.config.check import validate
from pipeline.config.compose import compose
from pipeline.demo import rows_of
from pipeline.report.data import read_run
from tests.benchmarks.test_demo_seeds import CONFIG, rows
from tests.pipeline.report.example_runs import write_stage


def test_the_pairs_have_swapped_labels(tmp_path: Path) -> None:
    arguments = guard_cases.flipped_arguments(tmp_path, 200)
    assert f"path: {tmp_path}/preferences.jsonl, eval_path: {tmp_path}/held_out_preferences.jsonl" in arguments[-1]
    for kind in ("preferences", "held_out_preferences"):
        actual = [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
        expected = rows_of(kind, 200, 1)
        assert [(row["chosen"], row["rejected"]) for row in actual] == [(r["rejected"], r["chosen"]) for r in expected]
        assert [row["prompt"] for row in actual] == [row["prompt"] for row in expected]
    config = validate(compose(["stage=reward", *arguments[2:]]))
    assert config.model.path == f"{guard_cases.DEMO}/sft/model"
    assert config.reward == validate(compose([])).reward  # the recipe of the demo


def test_a_case_reports_the_signs_and_the_best_step(tmp_path: Path) -> None:
    found = [{"step": 4, "sign": "gaming", "sentence": "the gold score fell"}]
    summary = {
        "stage": "ppo",
        "steps": 4,
        "exported_step": 2,
        "guard": {"action": "stop", "findings": found, "stopped_step": 4},
    }
    gold = {1.0: [{"sft": 0.25, "ppo": 0.5}] * 8, 0.0: [{"sft": 0.5, "ppo": 0.75}] * 8}
    write_stage(tmp_path / "ppo", summary=summary, samples=rows("ppo", gold), config=CONFIG.format(seed=1))
    steps = [(0, 1.0, 0.25), (2, 1.0, 0.625), (2, 0.0, 0.75), (3, 0.0, 0.875), (4, 1.0, 0.125)]
    lines = [json.dumps({"step": step, "temperature": at, "gold": [value] * 8}) for step, at, value in steps]
    (tmp_path / "ppo" / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    actual = guard_cases.case_result("no-kl", read_run(tmp_path))
    assert (actual.ours, actual.peer) == (0.5, 0.625)
    assert actual.detail["signs"] == "at rollout 4 (gaming)" and actual.detail["exported_step"] == 2
    assert actual.detail["below_best"] == {"1.0": (0.0, 0.0, 0.0), "0.0": (-0.125, -0.125, -0.125)}
    assert (actual.detail["SFT"], actual.detail["SFT_greedy"], actual.detail["greedy"]) == (0.25, 0.5, 0.75)
    assert actual.detail["verdict"].startswith("Training went wrong at rollout 4 (gaming). The guard stopped it")
