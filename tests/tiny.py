"""The smallest run that goes through everything: a two-layer Llama, made data, a few steps a stage."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.launch.worker import run_worker
from tests.ranks import Worker

ROOT = Path(__file__).parents[1]
SECONDS = 480  # for a process
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
    """A configuration; `sections` add to or override its sections."""
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


def lay_out(run_dir: Path, config: RunConfig, **of_stages: RunConfig) -> None:
    """Write the configuration of each stage into its folder, as the launcher does."""
    for stage in STAGES:
        own = of_stages.get(stage, config)
        own = own.model_copy(update={"reward": own.reward.model_copy(update={"init": "sft"})})
        (run_dir / stage).mkdir(parents=True, exist_ok=True)
        (run_dir / stage / "config.yaml").write_text(yaml.safe_dump(own.model_dump(mode="json")))


def start_worker(run_dir: Path, stage: str) -> Worker:
    """Start one rank of a stage as a process of its own, which does what `python -m PACKAGE --worker RUN_DIR` does."""
    module = f"{STAGES[stage].package}.train"
    return Worker(run_worker, stage, run_dir, module, environment={"OMP_NUM_THREADS": "1"})


def finish(worker: "Worker | subprocess.Popen[str]") -> str:
    """Wait for a worker; what it printed. Raises AssertionError where it failed."""
    output, _ = worker.communicate(timeout=SECONDS)
    assert worker.returncode == 0, output
    return output


def metrics(run_dir: Path, stage: str) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without the clock's figures."""
    lines = (run_dir / stage / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if not k.endswith(clock)} for line in lines]
