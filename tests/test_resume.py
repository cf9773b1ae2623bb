"""A stage that is killed at a random moment and started again ends like one that was left alone, bit for bit."""

import random
import shutil
import signal
import time
from pathlib import Path

from safetensors.torch import load_file

from tests.tiny import STAGES, finish, lay_out, metrics, start_worker, tiny_config

BEFORE = {"sft": ["tokenizer"], "reward": ["tokenizer", "sft"], "ppo": ["tokenizer", "sft", "reward"]}


def kill_at_random(run_dir: Path, stage: str, steps: int, rng: random.Random) -> str:
    """Start the stage and SIGKILL it after a random logged step; says when."""
    wanted, delay = rng.randint(1, steps - 1), rng.random() * 0.4
    worker = start_worker(run_dir, stage)
    log = run_dir / stage / "metrics.jsonl"
    while worker.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < wanted):
        time.sleep(0.01)
    time.sleep(delay)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    return f"{stage} killed {delay:.2f} s after line {wanted}"


def test_killed_and_resumed_equals_left_alone(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    config = tiny_config(sft={"dropout": 0.1}, model={"architecture": dropping()})
    lay_out(whole, config)
    for stage in STAGES:
        finish(start_worker(whole, stage))
        lay_out(killed, config)
        for name in BEFORE[stage]:
            shutil.copytree(whole / name, killed / name, dirs_exist_ok=True)
        said = kill_at_random(killed, stage, 6, rng)
        finish(start_worker(killed, stage))
        same(whole, killed, stage, f"seed {seed}: {said}")
    damage(killed)
    assert "is damaged (tensors-0.bin has 9 bytes" in finish(start_worker(killed, "sft"))
    same(whole, killed, "sft", "damaged")


def same(whole: Path, killed: Path, stage: str, where: str) -> None:
    assert metrics(whole, stage) == metrics(killed, stage), where
    ours, theirs = (load_file(run / stage / "model" / "model.safetensors") for run in (whole, killed))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours), where


def damage(run_dir: Path) -> None:
    """A finished stage without its model, and with a newest checkpoint that was cut off."""
    shutil.rmtree(run_dir / "sft" / "model")
    (run_dir / "sft" / "checkpoints" / "step-8" / "tensors-0.bin").write_bytes(b"truncated")


def dropping() -> dict[str, object]:
    """A GPT-2, which has dropout: the random generators must be restored for it to come out the same."""
    return {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 512}
