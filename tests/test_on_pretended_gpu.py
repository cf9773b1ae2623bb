"""All stages as a GPU runs them, on pretended ones (tests/pretended_gpu): they walk the CPU's curves."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.config.stages import STAGES
from pipeline.launch.worker import read_config
from tests.pretended_gpu import building
from tests.ranks import run_ranks
from tests.tiny import lay_out, metrics, tiny_config

WITHOUT = building.lacking()
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=str(WITHOUT))
SMALL: dict[str, Any] = {
    "sft": {"steps": 3, "batch_size": 4, "eval_examples": 4},
    "reward": {"steps": 3, "batch_size": 4, "eval_examples": 4},
    "dpo": {"steps": 3, "batch_size": 4, "eval_examples": 4},
    "ppo": {"steps": 1, "batch_size": 4},
    "rollout": {"max_new_tokens": 3},
    "evaluation": {"prompts": 1, "best_of": 2},
    "model": {"fused_kernels": "none"},  # Triton's interpreter cannot run Liger Kernel, which may be installed
}
# Greedy answers and the best of several are checked on one device with PPO's first configuration.
SAMPLED: dict[str, Any] = {**SMALL, "evaluation": {"prompts": 1, "best_of": 1, "temperatures": [1.0]}}
# Without the parity check, half of such a stage's time, where PPO does it on the same layout.
UNCHECKED: dict[str, Any] = {**SAMPLED, "rollout": {**SMALL["rollout"], "parity_check_every": 0}}
CURVES = {
    "sft": ("loss", "grad_norm", "eval_loss"),
    "reward": ("loss", "accuracy", "margin", "grad_norm", "eval_accuracy"),
    "dpo": ("loss", "accuracy", "margin", "grad_norm", "drift", "eval_loss"),
    "ppo": ("score", "kl", "entropy", "policy_loss", "value_loss", "grad_norm", "response_length", "eval_score"),
}


def run_on_cpu(folder: str) -> None:
    for name, stage in STAGES.items():
        import_module(f"{stage.package}.train").run(read_config(Path(folder) / name), Path(folder) / name)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run that the others are held against: one process, fp32."""
    folder = tmp_path_factory.mktemp("cpu")
    lay_out(folder, tiny_config(**SMALL, engine={"dtype": "fp32"}))
    run_ranks(run_on_cpu, 1, str(folder))
    yield folder


def run_on_device(folders: list[Path]) -> str:
    from tests.pretended_gpu.stages import run_stages  # importing it here would change this process's torch

    return run_stages(folders)


def run_on_devices(*folders: Path, ranks: int = 1) -> str:
    """Run the stages of these folders with one process for each pretended device, and return what was printed."""
    return "".join(run_ranks(run_on_device, ranks, list(folders), device="cuda"))


def compare(ours: Path, theirs: Path, stage: str, names: Sequence[str], rel: float, first: int | None = None) -> None:
    """The curves of these names, or only their first lines."""
    lines = metrics(ours, stage), metrics(theirs, stage)
    for one, other in list(zip(*lines, strict=True))[:first]:
        for name in set(names) & set(other):
            assert one[name] == pytest.approx(other[name], rel=rel, abs=rel), (stage, one["step"], name)


def test_one_device_trains_in_bf16_and_goes_on_after_a_stop(on_cpu: Path, tmp_path: Path) -> None:
    """As one GPU does by default: documents in a row by the variable-length kernel, answers from graphs. SFT and PPO
    with their optimizers on the host, the reward model with what is chosen for it; PPO's tokens may differ from fp32's.

    Then DPO and PPO with the defaults: in a step the host waits for the device once for an update. PPO also waits for
    what each model scores, and for each round of answers.
    """
    offload = {"offload_optimizer": "cpu"}
    lay_out(
        tmp_path, tiny_config(**SMALL, engine={"auto": True}),
        sft=tiny_config(**UNCHECKED, engine=offload), ppo=tiny_config(**SMALL, engine=offload),
    )  # fmt: skip
    told = run_on_devices(*(tmp_path / stage for stage in ("sft", "reward", "ppo")))
    assert "padded" not in told and "engine=auto: as configured" in told
    compare(tmp_path, on_cpu, "ppo", ("entropy",), rel=1e-2)
    last = metrics(tmp_path, "ppo")[-1]
    assert last["first_ratio_max_deviation"] < 1e-3 and last["generator_kl"] < 1e-3
    left_alone = metrics(tmp_path, "sft")
    model = load_file(tmp_path / "sft" / "model" / "model.safetensors")
    stop_after(tmp_path / "sft", step=2)
    three = {**SMALL["ppo"], "steps": 3, "eval_every": 0, "save_every": 9, "update_epochs": 1}
    default = tmp_path / "default"
    take_models(on_cpu, default)
    lay_out(default, tiny_config(**{**UNCHECKED, "ppo": three}))
    run_on_devices(tmp_path / "sft", default / "dpo", default / "ppo")
    for stage, folder in (("sft", tmp_path), ("reward", tmp_path), ("dpo", default)):
        compare(folder, on_cpu, stage, ("loss", "eval_loss"), rel=1e-2)
        compare(folder, on_cpu, stage, ("grad_norm",), rel=1e-2, first=1)
    assert metrics(tmp_path, "sft") == left_alone
    again = load_file(tmp_path / "sft" / "model" / "model.safetensors")
    assert all((model[name] == again[name]).all() for name in model)
    assert waits(default, "dpo", step=2) == {"engine/passes.py:to_numbers": 1}
    found = waits(default, "ppo", step=2)
    rounds = found.pop("engine/generation/decode_step.py:wait")
    assert rounds <= 2  # of 3 tokens
    updates = 2  # minibatches
    assert found == {
        "engine/passes.py:to_numbers": 2 * updates,  # actor, critic
        "engine/passes.py:to_host": 4,  # actor, reference, critic, reward model
        "engine/generation/inference_model.py:sync": 1,
        "step3_ppo/log.py:rollout_metrics": 1,
        "step3_ppo/log.py:_to_host": 1,
        "pipeline/tracking/metrics.py:phase": 3,
    }


def take_models(source: Path, target: Path) -> None:
    """Copy the tokenizer and the finished SFT and reward stages, which DPO and PPO start from, into another run."""
    for name in ("tokenizer", "sft", "reward"):
        shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def waits(run_dir: Path, stage: str, step: int) -> Counter[str]:
    """Where the host waited in a step, and how often."""
    lines = [json.loads(line) for line in (run_dir / stage / "waits.jsonl").read_text().splitlines()]
    return next(Counter(line["waits"]) for line in lines if line["step"] == step)


def stop_after(stage: Path, step: int) -> None:
    """Leave of a finished stage what one that was killed after a step leaves."""
    shutil.rmtree(stage / "model")
    for checkpoint in (stage / "checkpoints").iterdir():
        if checkpoint.name != f"step-{step}":
            shutil.rmtree(checkpoint)


def test_two_devices_walk_the_curves_of_one_cpu(on_cpu: Path, tmp_path: Path) -> None:
    """Under ZeRO-3, and under pipeline parallelism, where ranks send each other activations and gradients.

    The reward model's loop is SFT's, and two ranks on CPUs run every stage (test_parity.py).
    """
    sharded, staged = tmp_path / "sharded", tmp_path / "staged"
    engine = {"dtype": "fp32", "zero_stage": 3}
    take_models(on_cpu, sharded)
    shutil.rmtree(sharded / "sft")
    lay_out(sharded, tiny_config(**SAMPLED, engine=engine), sft=tiny_config(**UNCHECKED, engine=engine))
    lay_out(staged, tiny_config(**UNCHECKED, engine={"dtype": "fp32", "pipeline_parallel": 2}))
    run_on_devices(sharded / "sft", sharded / "ppo", staged / "sft", ranks=2)
    for folder, stage in ((sharded, "sft"), (sharded, "ppo"), (staged, "sft")):
        compare(folder, on_cpu, stage, CURVES[stage], rel=1e-4)
    assert waits(sharded, "sft", step=2) == {"engine/passes.py:to_numbers": 1}
