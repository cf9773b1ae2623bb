"""A stage that is killed or stopped, and then resumed, equals an undisturbed run bit for bit."""

import random
import shutil
import signal
import time
from pathlib import Path

from safetensors.torch import load_file

from pipeline.config.stages import STAGES
from tests.ranks import Worker
from tests.tiny import copy_stages, finish, metrics, start_worker, tiny_config, write_stage_configs

STEPS = {"sft": 6, "reward": 5, "dpo": 6, "ppo": 4}
INPUTS = {"sft": [], "reward": ["sft"], "dpo": ["sft"], "ppo": ["sft", "reward"]}


def kill_at_random(run_dir: Path, stage: str, steps: int, rng: random.Random) -> str:
    """Start the stage and send SIGKILL after a random logged step. Return a description of the moment."""
    lines, delay = rng.randint(1, steps - 1), rng.random() * 0.4
    worker = start_worker(run_dir, stage)
    wait_for_lines(worker, run_dir / stage, lines)
    time.sleep(delay)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    return f"{stage} killed {delay:.2f} s after line {lines}"


def wait_for_lines(worker: Worker, stage_dir: Path, lines: int) -> None:
    """Wait until the stage has logged `lines` lines, or has ended."""
    log = stage_dir / "metrics.jsonl"
    while worker.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < lines):
        time.sleep(0.01)


def stop_with_sigterm(run_dir: Path, stage: str) -> None:
    """Start the stage and send SIGTERM in its second step. Check that it saves the last step before it exits."""
    for _ in range(3):  # on a busy machine the stage may end before the signal arrives
        worker = start_worker(run_dir, stage)
        wait_for_lines(worker, run_dir / stage, 1)
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=240)
        if worker.returncode:
            break
        clear(run_dir, stage)
    assert worker.returncode == 130, output
    newest = max(int(place.name.removeprefix("step-")) for place in (run_dir / stage / "checkpoints").iterdir())
    assert f"{stage}: step {newest} of {STEPS[stage]} is saved" in output
    assert len(metrics(run_dir, stage)) == newest < STEPS[stage]


def test_resumed_run_equals_undisturbed_run(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    few = {name: {"steps": steps, "eval_examples": 8} for name, steps in STEPS.items() if name != "ppo"}
    best = {"export": "best", "eval_every": 2}
    config = tiny_config(
        sft={**few["sft"], "batch_size": 8, "dropout": 0.1, "schedule": "constant", "lr": 2e-2, **best},
        reward={**few["reward"], **best},
        dpo=few["dpo"],
        model={"architecture": gpt2_with_dropout()},
        ppo={"steps": STEPS["ppo"], "reward_function": write_reward_function(tmp_path)},
        evaluation={"prompts": 4, "temperatures": [1.0], "best_of": 1},
    )
    write_stage_configs(undisturbed, config)
    for stage in STAGES:
        finish(start_worker(undisturbed, stage))
        write_stage_configs(killed, config)
        copy_stages(undisturbed, killed, *INPUTS[stage])
        if stage == "sft":  # as after a kill before the first checkpoint: the machine is not measured again
            shutil.copy(undisturbed / stage / "plan.json", killed / stage)
        if stage == "dpo":  # it must resume with the reference of its start, not with the trained policy
            stop_with_sigterm(killed, stage)
        moment = kill_at_random(killed, stage, STEPS[stage], rng)
        finish(start_worker(killed, stage))
        assert_equal_runs(undisturbed, killed, stage, f"seed {seed}: {moment}")
    damage(killed)
    assert "is damaged (tensors-0.safetensors has 9 bytes" in finish(start_worker(killed, "sft"))
    assert_equal_runs(undisturbed, killed, "sft", "damaged")


def clear(run_dir: Path, stage: str) -> None:
    """Delete all files of a stage except its configuration."""
    for each in (run_dir / stage).iterdir():
        if each.name != "config.yaml":
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def assert_equal_runs(undisturbed: Path, resumed: Path, stage: str, where: str) -> None:
    """Compare the metrics, PPO's rollouts, and the weights of two runs, bit for bit."""
    assert metrics(resumed, stage) == metrics(undisturbed, stage), where
    if stage == "ppo":
        assert len({(run / stage / "rollouts.jsonl").read_text() for run in (undisturbed, resumed)}) == 1, where
    weights, resumed_weights = (
        load_file(run / stage / "model" / "model.safetensors") for run in (undisturbed, resumed)
    )
    assert weights.keys() == resumed_weights.keys()
    assert all((weights[name] == resumed_weights[name]).all() for name in weights), where


def damage(run_dir: Path) -> None:
    """Remove the model of a finished SFT stage and truncate its newest checkpoint."""
    shutil.rmtree(run_dir / "sft" / "model")
    (run_dir / "sft" / "checkpoints" / f"step-{STEPS['sft']}" / "tensors-0.safetensors").write_bytes(b"truncated")


def write_reward_function(folder: Path) -> str:
    """Write a reward function, and return its name."""
    (folder / "mine.py").write_text("def score(answer, row):\n    return len(answer) % 7 / 7 + len(row['prompt'])\n")
    return f"{folder}/mine.py:score"


def gpt2_with_dropout() -> dict[str, object]:
    """Return a GPT-2, whose dropout gives equal runs only if a resume restores the random generators."""
    return {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 512}
