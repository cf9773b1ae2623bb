"""The figures of the demo over seeds, read from made run folders."""

from pathlib import Path
from typing import Any

from benchmarks import demo_seeds
from pipeline.report.data import read_run
from tests.pipeline.report.example_runs import write_stage

CONFIG = "seed: {seed}\nevaluation: {{temperatures: [1.0, 0.0]}}\n"


def rows(policy: str, gold: dict[float, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return samples with the given gold scores by temperature, of prompts 0, 1, ..."""
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "answers": dict.fromkeys(scores, "2"),
            "gold": scores,
            "temperature": temperature,
        }
        for temperature, prompts in gold.items()
        for number, scores in enumerate(prompts)
    ]


def write_run(folder: Path, policy: str, gold: dict[float, list[dict[str, float]]], seed: int = 1) -> None:
    summary = {"stage": policy, "steps": 1, "guard": {"findings": []}}
    write_stage(folder / policy, summary=summary, samples=rows(policy, gold), config=CONFIG.format(seed=seed))


def test_a_method_without_best_of_4_is_compared_with_that_of_the_demo(tmp_path: Path) -> None:
    sampled = [{"sft": 0.0, "ppo": 0.5, "best_of": 0.5}, {"sft": 0.5, "ppo": 1.0, "best_of": 0.75}]
    write_run(tmp_path / "ppo", "ppo", {1.0: sampled, 0.0: [{"sft": 0.0, "ppo": 1.0}] * 2})
    own = [{"sft": 0.0, "dpo": 0.5}, {"sft": 0.5, "dpo": 1.0}]
    write_run(tmp_path / "dpo", "dpo", {1.0: own, 0.0: [{"sft": 0.25, "dpo": 1.0}] * 2})
    found = demo_seeds.seed_result("seed-3", "dpo", read_run(tmp_path / "dpo"), read_run(tmp_path / "ppo"))
    assert (found.case, found.ours, found.peer) == ("seed-3 dpo", 0.75, 0.625)
    assert (found.detail["SFT"], found.detail["SFT_greedy"], found.detail["greedy"]) == (0.25, 0.25, 1.0)
    assert found.detail["change"] == "+0.50 (+0.50 to +0.50)"
    # The differences 0 and 0.25: mean 0.125, standard error 0.125, times 12.706 with one degree of freedom.
    assert found.detail["change_from_best"] == "+0.12 (-1.46 to +1.71)"
    assert found.detail["change_greedy"] == "+0.75 (+0.75 to +0.75)"


def test_the_pooled_figures_are_means_over_seeds(tmp_path: Path) -> None:
    for seed, gain in ((1, 0.25), (2, 0.5)):
        sampled = {"sft": 0.25, "ppo": 0.25 + gain, "best_of": 0.375}
        write_run(tmp_path / str(seed), "ppo", {1.0: [sampled] * 2, 0.0: [{"sft": 0.5, "ppo": 0.75}] * 2}, seed)
    runs = [read_run(tmp_path / "1"), read_run(tmp_path / "2")]
    found = demo_seeds.pooled_result("ppo", runs, runs)
    assert (found.case, found.ours, found.detail["SFT_sampled"]) == ("ppo, 2 seeds", 0.625, 0.25)
    assert (found.detail["seeds_sampled"], found.detail["seeds_greedy"]) == ("+0.25 to +0.50", "+0.25 to +0.25")
    assert found.detail["change_greedy"] == "+0.25 (+0.25 to +0.25)"
    # At temperature 1, 0.125 and 0.375 above the best of four answers: their mean is 0.25. Greedy, 0.375 on each seed.
    assert str(found.detail["from_best_sampled"]).startswith("+0.25 (")
    assert found.detail["from_best_greedy"] == "+0.38 (+0.38 to +0.38)"
