"""A stage that is stopped, at a random moment or by a reward function, and started again ends like one that was left
alone, bit for bit.
"""

import json
import random
import shutil
import signal
import time
from pathlib import Path

from safetensors.torch import load_file

from pipeline.config.stages import STAGES
from tests.ranks import Worker
from tests.tiny import finish, lay_out, metrics, start_worker, tiny_config

FROM_SFT = ["tokenizer", "sft"]
BEFORE = {"sft": ["tokenizer"], "reward": FROM_SFT, "dpo": FROM_SFT, "ppo": [*FROM_SFT, "reward"]}


def kill_at_random(run_dir: Path, stage: str, steps: int, rng: random.Random) -> str:
    """Start the stage and SIGKILL it after a random logged step; says when."""
    wanted, delay = rng.randint(1, steps - 1), rng.random() * 0.4
    worker = started(run_dir, stage, wanted)
    time.sleep(delay)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    return f"{stage} killed {delay:.2f} s after line {wanted}"


def started(run_dir: Path, stage: str, lines: int) -> Worker:
    """A stage at work, when so many steps are logged."""
    worker = start_worker(run_dir, stage)
    log = run_dir / stage / "metrics.jsonl"
    while worker.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < lines):
        time.sleep(0.01)
    return worker


def ask_to_stop(run_dir: Path, stage: str) -> None:
    """Start the stage and SIGTERM it in its second step: it is saved as far as it came."""
    for _ in range(3):  # on a busy machine it may be through before it is asked
        worker = started(run_dir, stage, 1)
        worker.send_signal(signal.SIGTERM)
        told, _ = worker.communicate(timeout=240)
        if worker.returncode:
            break
        clear(run_dir, stage)
    assert worker.returncode == 130, told
    newest = max(int(place.name.removeprefix("step-")) for place in (run_dir / stage / "checkpoints").iterdir())
    assert f"{stage}: step {newest} of 8 is saved" in told and len(metrics(run_dir, stage)) == newest < 8


def test_killed_and_resumed_equals_left_alone(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    best = {"export": "best", "eval_every": 2}
    config = tiny_config(
        sft={"dropout": 0.1, "schedule": "constant", "lr": 2e-2, **best},
        reward=best,
        model={"architecture": dropping()},
        ppo={"reward_function": function_in(tmp_path)},
    )
    lay_out(whole, config)
    for stage in STAGES:
        finish(start_worker(whole, stage))
        lay_out(killed, config)
        for name in BEFORE[stage]:
            shutil.copytree(whole / name, killed / name, dirs_exist_ok=True)
        if stage in ("reward", "dpo"):  # whose reference may not be read again by a policy that has learned
            ask_to_stop(killed, stage)
        said = kill_at_random(killed, stage, 6, rng)
        finish(start_worker(killed, stage))
        same(whole, killed, stage, f"seed {seed}: {said}")
    damage(killed)
    assert "is damaged (tensors-0.safetensors has 9 bytes" in finish(start_worker(killed, "sft"))
    same(whole, killed, "sft", "damaged")


def clear(run_dir: Path, stage: str) -> None:
    """Leave of a stage what it began with."""
    for each in (run_dir / stage).iterdir():
        if each.name != "config.yaml":
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def same(whole: Path, killed: Path, stage: str, where: str, *, but: tuple[str, ...] = ()) -> None:
    """Figures, `but` some of them, and weights."""
    logged = (metrics(run, stage) for run in (whole, killed))
    one, other = ([{k: v for k, v in line.items() if k not in but} for line in lines] for lines in logged)
    assert one == other, where
    if stage == "ppo" and not but:
        assert len({(run / stage / "rollouts.jsonl").read_text() for run in (whole, killed)}) == 1, where
    ours, theirs = (load_file(run / stage / "model" / "model.safetensors") for run in (whole, killed))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours), where


def damage(run_dir: Path) -> None:
    """A finished stage without its model, and with a newest checkpoint that was cut off."""
    shutil.rmtree(run_dir / "sft" / "model")
    (run_dir / "sft" / "checkpoints" / "step-8" / "tensors-0.safetensors").write_bytes(b"truncated")


FUNCTION = """
from pathlib import Path

calls = 0

def score(answer, row):
    global calls
    calls += 1
    if calls == 30 and Path(__file__).with_name("broken").exists():
        raise ConnectionError("no answer from the judge")
    return len(answer) % 7 / 7 + len(row["prompt"])
"""


def function_in(folder: Path) -> str:
    """A reward function that raises at its thirtieth call if a file `broken` stands beside it."""
    (folder / "mine.py").write_text(FUNCTION)
    return f"{folder}/mine.py:score"


def test_a_function_that_raises_loses_nothing(tmp_path: Path) -> None:
    """The thirtieth call is in the third rollout, behind eight held-out prompts and two rollouts of eight. The
    reference is there for its figures alone, and in the first start only.
    """
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    by_function = {"reward_model": False, "reward_function": function_in(tmp_path)}
    plain = {"steps": 4, "kl_coef": 0.0, "kl_target": None, "guard": "off", **by_function}
    once = {"temperatures": [1.0], "best_of": 1}  # one call per held-out prompt
    config, watching = (
        tiny_config(sft={"steps": 2}, ppo={**plain, **keys}, evaluation=once) for keys in ({}, {"reference": True})
    )
    lay_out(whole, config)
    finish(start_worker(whole, "sft"))
    finish(start_worker(whole, "ppo"))
    lay_out(stopped, watching)
    for name in ("tokenizer", "sft"):
        shutil.copytree(whole / name, stopped / name, dirs_exist_ok=True)
    (tmp_path / "broken").touch()
    worker = start_worker(stopped, "ppo")
    said, _ = worker.communicate(timeout=240)
    assert worker.returncode == 2 and "score raised ConnectionError: no answer from the judge (line 10)" in said
    assert [folder.name for folder in (stopped / "ppo" / "checkpoints").iterdir()] == ["step-2"]
    (tmp_path / "broken").unlink()
    lay_out(stopped, config)
    assert "resumes after step 2 of 4" in finish(start_worker(stopped, "ppo"))
    assert ["kl" in line for line in metrics(stopped, "ppo")] == [False, True, True, False, False]
    assert "kl" not in json.loads((stopped / "ppo" / "summary.json").read_text())["final"]
    same(whole, stopped, "ppo", "a function that raised", but=("kl", "kl_k3"))


def dropping() -> dict[str, object]:
    """A GPT-2, which has dropout: the random generators must be restored for it to come out the same."""
    return {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 512}
