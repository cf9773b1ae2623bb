"""The smallest run with all stages: a two-layer Llama, the built-in arithmetic data, a few steps for each stage."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.launch.worker import run_worker
from tests.ranks import Worker

ROOT = Path(__file__).parents[1]
CURVES = {
    "sft": ("loss", "grad_norm", "eval_loss"),
    "reward": ("loss", "accuracy", "margin", "eval_accuracy"),
    "dpo": ("loss", "accuracy", "margin", "grad_norm", "chosen_logprob", "drift", "eval_loss"),
    "ppo": ("score", "kl", "entropy", "policy_loss", "value_loss", "response_length", "kl_coef", "eval_score"),
}
"""The metrics of each stage that do not depend on its layout."""
SECONDS = 480  # limit of one process
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


def tiny_config(**sections: dict[str, Any]) -> RunConfig:
    """Return a configuration. Each of `sections` overrides keys of the section with its name."""
    raw: dict[str, Any] = {
        "model": {"name": "tiny", "weights": "random", "tokenizer": "train", "architecture": ARCHITECTURE},
        "data": {"name": "demo", "sources": [{"builtin": "demo"}], "demo_examples": 400},
        "tracking": {"kind": "none"},
        "sft": {"steps": 8, "batch_size": 16, "max_length": 160, "lr": 2e-3, "save_every": 2, "dropout": 0.0},
        "reward": {"steps": 8, "batch_size": 8, "max_length": 160, "lr": 1e-3, "save_every": 3},
        "dpo": {"steps": 8, "batch_size": 8, "max_length": 160, "lr": 1e-3, "save_every": 2},
        "ppo": {"steps": 6, "batch_size": 8, "lr": 1e-4, "critic_lr": 1e-3, "update_epochs": 2, "save_every": 2},
        "rollout": {"max_new_tokens": 12, "max_prompt_tokens": 128},
        "evaluation": {"prompts": 8},
    }
    raw["ppo"] |= {"kl_target": 3.0, "kl_horizon": 100, "minibatches": 2, "ema": 0.5}
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return RunConfig.model_validate(raw)


def write_stage_configs(run_dir: Path, config: RunConfig, **stage_configs: RunConfig) -> None:
    """Write the configuration of each stage into its folder, as the launcher does. `stage_configs` replace `config`."""
    for stage in STAGES:
        stage_config = stage_configs.get(stage, config)
        reward = stage_config.reward.model_copy(update={"init": "sft"})
        stage_config = stage_config.model_copy(update={"reward": reward})
        (run_dir / stage).mkdir(parents=True, exist_ok=True)
        (run_dir / stage / "config.yaml").write_text(yaml.safe_dump(stage_config.model_dump(mode="json")))


def copy_stages(source: Path, target: Path, *stages: str) -> None:
    """Copy the tokenizer and finished stages, from which later stages start, into another run."""
    for name in ("tokenizer", *stages):
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def start_worker(run_dir: Path, stage: str) -> Worker:
    """Start one rank of a stage in a new process, as `python -m PACKAGE --worker RUN_DIR` does."""
    module = f"{STAGES[stage].package}.train"
    return Worker(run_worker, stage, run_dir, module, environment={"OMP_NUM_THREADS": "1"})


def finish(worker: "Worker | subprocess.Popen[str]") -> str:
    """Wait for a worker and return its output. Raise AssertionError if it failed."""
    output, _ = worker.communicate(timeout=SECONDS)
    assert worker.returncode == 0, output
    return output


def metrics(run_dir: Path, stage: str) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl without durations and token rates."""
    lines = (run_dir / stage / "metrics.jsonl").read_text().splitlines()
    timings = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if not k.endswith(timings)} for line in lines]
