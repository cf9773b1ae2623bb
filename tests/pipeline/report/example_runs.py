"""Example run folders for the tests, with random metrics in the formats of the stages."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def sample(base: float, sft: float, ppo: float, *, text: str = "17", scores: bool = True) -> dict[str, Any]:
    """Return a line of samples.jsonl with these gold scores. Reward scores are three times the gold score minus one."""
    gold = {"base": base, "sft": sft, "ppo": ppo}
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "What is 8 + 9?"}],
        "answers": dict.fromkeys(gold, text),
        "gold": gold,
    }
    if scores:
        row["scores"] = {model: 3 * value - 1 for model, value in gold.items()}
    return row


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


MANIFEST = {"identity": {}, "request": "", "stages": {"sft": {"produced": {"model": "sha256:9f"}}}}


def write_demo_run(run_dir: Path, *, gamed: bool = False, prompts: int = 96, seed: int = 1) -> None:
    """Write a complete run like that of `make demo`: RLHF helps, or the reward model is gamed."""
    noise = random.Random(2 + seed)
    memory = [{"rank": rank, "device_bytes": 0, "host_bytes": (900 + 15 * rank) * 2**20} for rank in range(2)]
    _write_sft(run_dir / "sft", noise, memory)
    _write_reward(run_dir / "reward", noise, memory)
    _write_ppo(run_dir / "ppo", noise, memory, gamed, prompts)
    (run_dir / "manifest.json").write_text(json.dumps(MANIFEST, indent=2))
    for stage in ("sft", "reward", "ppo"):
        (run_dir / stage / "config.yaml").write_text(CONFIG.replace("seed: 1", f"seed: {seed}"))


def _write_sft(folder: Path, noise: random.Random, memory: list[dict[str, int]]) -> None:
    rows = []
    for step in range(1, 151):
        row = {
            "step": step, "seconds": 0.4, "tokens": 4096, "lr": 3e-4 * min(step / 10, (160 - step) / 150),
            "loss": 0.6 + 4.5 * math.exp(-step / 18) + noise.gauss(0, 0.05), "grad_norm": 1 + 3 / step + noise.random(),
        }  # fmt: skip
        if step % 30 == 0:
            row["eval_loss"] = 0.63 + 4.5 * math.exp(-step / 18)
        rows.append(row)
    summary = {
        "stage": "sft", "steps": 150, "seconds": 61.0, "tokens": 614400, "tokens_per_second": 10072.0,
        "seconds_by_phase": {"train": 51.5, "evaluate": 5.0, "save": 2.4, "export": 0.6},
        "peak_memory_by_rank": memory, "final": {"loss": 0.61, "eval_loss": 0.63}, "best": {"eval_loss": 0.63},
        "gold_score": 0.45,
    }  # fmt: skip
    write_stage(folder, rows, summary, config=CONFIG)


def _write_reward(folder: Path, noise: random.Random, memory: list[dict[str, int]]) -> None:
    rows = []
    for step in range(1, 91):
        accuracy = min(1.0, 0.92 - 0.42 * math.exp(-step / 15) + noise.gauss(0, 0.03))
        row = {
            "step": step, "seconds": 0.5, "tokens": 3000, "lr": 1e-4 * (1 - step / 95),
            "loss": 0.22 + 0.47 * math.exp(-step / 15) + noise.gauss(0, 0.02), "accuracy": accuracy,
            "margin": 2.5 - 2.5 * math.exp(-step / 20) + noise.gauss(0, 0.1), "grad_norm": 2 + noise.random(),
        }  # fmt: skip
        if step % 30 == 0:
            row["eval_accuracy"] = 0.9 - 0.42 * math.exp(-step / 15)
        rows.append(row)
    summary = {
        "stage": "reward", "steps": 90, "seconds": 47.0, "tokens": 270000, "tokens_per_second": 5745.0,
        "seconds_by_phase": {"train": 42.0, "evaluate": 3.0, "save": 1.1, "export": 0.5},
        "peak_memory_by_rank": memory, "final": {"eval_accuracy": 0.897}, "eval_accuracy": 0.897, "eval_pairs": 512.0,
        "eval_accuracy_by_source": {"demo": 0.897, "demo-forms": 0.871}, "eval_accuracy_chosen_longer": 0.93,
        "eval_accuracy_rejected_longer": 0.81,
    }  # fmt: skip
    write_stage(folder, rows, summary, config=CONFIG)


def _gold(step: int, gamed: bool) -> float:
    risen = 0.45 + 0.34 * (1 - math.exp(-step / 12))
    return risen - (0.012 * max(0, step - 25) if gamed else 0.0)


def _write_ppo(folder: Path, noise: random.Random, memory: list[dict[str, int]], gamed: bool, prompts: int) -> None:
    rows = []
    for step in range(1, 61):
        row = {
            "step": step, "seconds": 2.6, "tokens": 5000, "lr": 1e-4 * (1 - step / 65),
            "score": -0.2 + 2.2 * (1 - math.exp(-step / 15)) + noise.gauss(0, 0.12), "score_std": 1.1 - step / 120,
            "kl": 9 * (1 - math.exp(-step / 20)) + noise.gauss(0, 0.3), "approx_kl": 0.008 + noise.random() * 0.004,
            "entropy": 1.6 * math.exp(-step / 40) + 0.2, "response_length": 22 - step / 8 + noise.gauss(0, 0.8),
            "eos_rate": min(1.0, 0.8 + step / 250), "first_ratio": 1 + noise.gauss(0, 2e-7),
            "first_ratio_max_deviation": abs(noise.gauss(0, 2e-6)), "clip_fraction": 0.08 + noise.random() * 0.04,
            "value_clip_fraction": 0.02 + noise.random() * 0.02, "policy_loss": -0.02 + noise.gauss(0, 0.004),
            "value_loss": 0.4 * math.exp(-step / 10) + 0.08 + noise.random() * 0.02,
            "explained_variance": 0.8 - 0.9 * math.exp(-step / 8) + noise.gauss(0, 0.03),
            "generate_seconds": 1.2 + noise.random() * 0.1, "score_seconds": 0.4, "train_seconds": 0.9,
            "flip_seconds": 0.01, "tokens_per_second": 1900 + noise.gauss(0, 60),
        }  # fmt: skip
        if step % 5 == 0 or step == 1:
            row["eval_score"] = -0.2 + 2.2 * (1 - math.exp(-step / 15))
            row["gold_score"] = _gold(step, gamed)
        rows.append(row)
    end = _gold(60, gamed)
    summary = {
        "stage": "ppo", "steps": 60, "seconds": 161.0, "tokens": 300000, "tokens_per_second": 1863.0,
        "seconds_by_phase": {"generate": 73.0, "score": 24.0, "train": 54.0, "flip": 0.6, "evaluate": 8.0},
        "peak_memory_by_rank": memory, "final": {"score": 1.9, "kl": 8.4}, "gold_score": end, "kl": 8.4,
    }  # fmt: skip
    samples = [_made_sample(noise, end, bonus=2.5 if gamed else 0.0) for _ in range(prompts)]
    samples = [{**sample, "temperature": temperature} for temperature in (1.0, 0.0) for sample in samples]
    write_stage(folder, rows, summary, samples, CONFIG)
    levels = [noise.gauss(0, 0.1) for _ in range(prompts)]
    grades = [
        {"step": step, "temperature": temperature, "gold": [_gold(step, gamed) + level for level in levels]}
        for step in (1, *range(5, 61, 5))
        for temperature in (1.0, 0.0)
    ]
    rollouts = [
        {"step": step, "score": step / 30 + noise.gauss(0, 0.5), "tokens": 20, "kl": step / 10 + noise.gauss(0, 1)}
        for step in range(1, 61)
        for _ in range(4)
    ]
    (folder / "evaluations.jsonl").write_text(_lines(grades), encoding="utf-8")
    (folder / "rollouts.jsonl").write_text(_lines(rollouts), encoding="utf-8")


def _made_sample(noise: random.Random, end: float, bonus: float) -> dict[str, Any]:
    first, second = noise.randint(2, 60), noise.randint(2, 60)
    gold = {model: min(1.0, max(0.0, noise.gauss(mean, 0.22))) for model, mean in
            (("base", 0.08), ("sft", 0.45), ("ppo", end))}  # fmt: skip
    return {
        "prompt": [{"role": "user", "content": f"What is {first} + {second}? Answer in one sentence."}],
        "answers": {
            "base": "the the 4 of a is and list 7 7 7 is the word red" + " the" * noise.randint(0, 20),
            "sft": f"{first} + {second} is {first + second + noise.choice((0, 0, 1, 10))}. I am not sure of it.",
            "ppo": f"{first} plus {second} is {first + second}.",
        },
        "scores": {
            model: 3 * value - 1 + noise.gauss(0, 0.6) + (bonus if model == "ppo" else 0)
            for model, value in gold.items()
        },
        "gold": gold,
    }
