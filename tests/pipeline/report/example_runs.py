"""Example run folders for the tests, with random metrics in the formats of the stages."""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.evaluation.samples import Sample
from pipeline.report.data import RunReading, StageReading

HOSTILE = "<script>alert('x')</script> & \"quotes\" \u202e\x1b[31m \ud800"


def write_stage(
    folder: Path,
    rows: Iterable[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    samples: Iterable[Mapping[str, Any]] = (),
    config: str = "",
) -> None:
    """Write a stage folder with only the given files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"metrics.jsonl": _lines(rows), "samples.jsonl": _lines(samples), "config.yaml": config}
    if summary is not None:
        texts["summary.json"] = json.dumps(summary)
    for name, text in texts.items():
        if text:
            (folder / name).write_text(text, encoding="utf-8")


def update_json(file: Path, **values: Any) -> None:
    """Set values in the object of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def update_lines(file: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace each object of a JSONL file."""
    file.write_text(_lines(change(json.loads(line)) for line in file.read_text().splitlines()))


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sample(base: float, sft: float, ppo: float, *, text: str = "17") -> dict[str, Any]:
    """Return a line of samples.jsonl with these gold scores. Reward scores are three times the gold score minus one."""
    gold = {"base": base, "sft": sft, "ppo": ppo}
    return {
        "prompt": [{"role": "user", "content": "What is 8 + 9?"}],
        "answers": dict.fromkeys(gold, text),
        "gold": gold,
        "scores": {model: 3 * value - 1 for model, value in gold.items()},
    }


def run_of(rows: Sequence[Sample], settings: Mapping[str, Any] | None = None, **summary: Any) -> RunReading:
    """Return a run whose PPO stage has finished with these answers."""
    ppo = StageReading("ppo", summary={"steps": 3, **summary}, samples=rows)
    return RunReading("run", {"ppo": ppo}, settings or {})


CONFIG = """name: demo-1
seed: 1
model:
  name: tiny
data:
  name: demo
engine:
  zero_stage: 0
evaluation:
  prompts: 64
  table_rows: 8
"""


EVALUATED = (1, *range(5, 61, 5))  # steps of PPO
MANIFEST = {"identity": {}, "request": "", "stages": {"sft": {"produced": {"model": "sha256:9f"}}}}


def write_demo_run(run_dir: Path, *, gamed: bool = False, prompts: int = 96, seed: int = 1) -> None:
    """Write a complete run like that of `make demo`: RLHF helps, or the reward model is gamed."""
    config = CONFIG.replace("seed: 1", f"seed: {seed}")
    spent = {
        "tokens": 300000, "tokens_per_second": 1863.0, "seconds_by_phase": {"train": 42.0, "evaluate": 5.0},
        "peak_memory_by_rank": [{"rank": n, "device_bytes": 0, "host_bytes": (900 + 15 * n) * 2**20} for n in (0, 1)],
    }  # fmt: skip
    sft = [
        {"step": step, "loss": 0.6 + 4.5 / step, "grad_norm": 1 + 3 / step, "lr": 3e-4 / step}
        | ({"eval_loss": 0.63 + 4.5 / step} if step % 30 == 0 else {})
        for step in range(1, 151)
    ]
    write_stage(run_dir / "sft", sft, {"steps": 150, "seconds": 61.0, **spent}, config=config)
    reward = [
        {"step": step, "loss": 0.7 / step, "accuracy": 0.9 - 0.4 / step, "margin": 2 - 2 / step}
        | ({"eval_accuracy": 0.9 - 0.4 / step} if step % 30 == 0 else {})
        for step in range(1, 91)
    ]
    accuracies = {
        "eval_accuracy": 0.897, "eval_pairs": 512.0, "eval_accuracy_by_source": {"demo": 0.897, "demo-forms": 0.871},
        "eval_accuracy_chosen_longer": 0.93, "eval_accuracy_rejected_longer": 0.81,
    }  # fmt: skip
    write_stage(run_dir / "reward", reward, {"steps": 90, "seconds": 47.0, **accuracies, **spent}, config=config)
    ppo = [
        {
            "step": step, "score": 2 - 2 / step, "kl": step / 7, "entropy": 1.6 / step, "response_length": 22.0,
            "first_ratio_max_deviation": 1e-6, "explained_variance": 0.8 - 0.9 / step, "generate_seconds": 1.2,
            "train_seconds": 0.9, "tokens_per_second": 1900.0,
        }
        | ({"eval_score": 2 - 2 / step, "gold_score": _gold(step, gamed)} if step in EVALUATED else {})
        for step in range(1, 61)
    ]  # fmt: skip
    noise = random.Random(seed)
    samples = [_made_sample(noise, _gold(60, gamed), bonus=2.5 if gamed else 0.0) for _ in range(prompts)]
    samples = [{**sample, "temperature": temperature} for temperature in (1.0, 0.0) for sample in samples]
    write_stage(run_dir / "ppo", ppo, {"steps": 60, "seconds": 161.0, **spent}, samples, config)
    levels = [noise.gauss(0, 0.1) for _ in range(prompts)]
    grades = [
        {"step": step, "temperature": temperature, "gold": [_gold(step, gamed) + level for level in levels]}
        | {"scores": [step / 30 + level for level in levels]}
        for step in EVALUATED
        for temperature in (1.0, 0.0)
    ]
    rollouts = [{"step": step, "score": step / 30, "tokens": 20, "kl": noise.random()} for step in range(1, 61)]
    (run_dir / "ppo" / "evaluations.jsonl").write_text(_lines(grades), encoding="utf-8")
    (run_dir / "ppo" / "rollouts.jsonl").write_text(_lines(rollouts), encoding="utf-8")
    (run_dir / "manifest.json").write_text(json.dumps(MANIFEST, indent=2))


def _gold(step: int, gamed: bool) -> float:
    risen = 0.45 + 0.34 * (1 - math.exp(-step / 12))
    return risen - (0.012 * max(0, step - 25) if gamed else 0.0)


def _made_sample(noise: random.Random, end: float, bonus: float) -> dict[str, Any]:
    first, second, means = noise.randint(2, 999), noise.randint(2, 999), {"base": 0.08, "sft": 0.45, "ppo": end}
    gold = {model: min(1.0, max(0.0, noise.gauss(mean, 0.15))) for model, mean in means.items()}
    return {
        "prompt": [{"role": "user", "content": f"What is {first} + {second}?"}],
        "answers": {"base": "the 4" + " the" * (first % 20), "sft": f"{first} or so.", "ppo": f"{first + second}."},
        "scores": {
            model: 3 * value - 1 + noise.gauss(0, 0.6) + (bonus if model == "ppo" else 0)
            for model, value in gold.items()
        },
        "gold": gold,
    }
