"""Run stages on simulated GPUs (tests/simulated_gpu) and compare their metrics with a run on the CPU in fp32.

SFT, the reward model and PPO run here. DPO has their packed pairs, their log-probs and the loop of SFT.
"""

import json
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.stages import STAGES
from pipeline.launch.worker import read_config
from tests.ranks import run_ranks
from tests.simulated_gpu import building
from tests.tiny import ARCHITECTURE, CURVES, copy_stages, metrics, tiny_config, write_stage_configs

REASON = building.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
RUN = ("sft", "reward", "ppo")
SMALL: dict[str, Any] = {
    # A micro-batch has room for some sequences or pairs of 160 tokens each: the dry run fills it.
    "sft": {"steps": 3, "batch_size": 4, "eval_examples": 2, "micro_batch_tokens": 640},
    "reward": {"steps": 3, "batch_size": 2, "eval_examples": 2, "micro_batch_tokens": 640},
    "ppo": {"steps": 1, "batch_size": 4},
    "rollout": {"max_new_tokens": 3},
    "evaluation": {"prompts": 1, "best_of": 2},
    "model": {
        # The interpreter runs one program for each key head of a sequence, and joins the splits of each query head.
        "architecture": {**ARCHITECTURE, "num_attention_heads": 2, "num_key_value_heads": 1},
        "fused_kernels": "none",  # Triton's interpreter cannot run Liger Kernel, which may be installed
    },
}
# The parity check takes half of the time of a stage that generates. SFT makes it once, on one device.
UNCHECKED: dict[str, Any] = {**SMALL, "rollout": {**SMALL["rollout"], "parity_check_every": 0}}
# SMALL also evaluates greedy answers and the best of several answers. PPO does this once, on one device.
SHORT: dict[str, Any] = {"prompts": 1, "best_of": 1, "temperatures": [1.0]}
CHECKED = {**SMALL, "evaluation": SHORT}
UNCHECKED_SHORT = {**UNCHECKED, "evaluation": SHORT}


def run_on_cpu(folder: str, in_bf16: str) -> None:
    for name in RUN:
        import_module(f"{STAGES[name].package}.train").run(read_config(Path(folder) / name), Path(folder) / name)
    copy_stages(Path(folder), Path(in_bf16), "sft")
    import_module("step2_reward.train").run(read_config(Path(in_bf16) / "reward"), Path(in_bf16) / "reward")


@pytest.fixture(scope="module")
def cpu_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The reference runs on the CPU: all stages in fp32, and a reward model in bf16 from the SFT model of fp32.

    Rounding to bf16 may move the first norm of the reward model by 1.2 %.
    """
    folder, in_bf16 = tmp_path_factory.mktemp("fp32"), tmp_path_factory.mktemp("bf16")
    write_stage_configs(folder, tiny_config(**UNCHECKED_SHORT, engine={"dtype": "fp32"}))
    write_stage_configs(in_bf16, tiny_config(**UNCHECKED_SHORT, engine={"dtype": "bf16"}))
    run_ranks(run_on_cpu, 1, str(folder), str(in_bf16))
    return folder, in_bf16


def run_on_device(folders: list[Path]) -> str:
    from tests.simulated_gpu.stages import run_stages  # importing it here would change this process's torch

    return run_stages(folders)


def run_on_devices(*folders: Path, ranks: int = 1) -> str:
    """Run the stages of these folders with `ranks` processes, each on a simulated device. Return their output."""
    return "".join(run_ranks(run_on_device, ranks, list(folders), device="cuda"))


def compare(
    actual_dir: Path, reference_dir: Path, stage: str, names: Sequence[str], rel: float, first: int | None = None
) -> None:
    """Compare the metrics of these names at every logged step, or only at the `first` steps."""
    lines = metrics(actual_dir, stage), metrics(reference_dir, stage)
    for actual, reference in list(zip(*lines, strict=True))[:first]:
        for name in set(names) & set(reference):
            assert actual[name] == pytest.approx(reference[name], rel=rel, abs=rel), (stage, actual["step"], name)


def test_one_device_in_bf16_follows_the_cpu(cpu_runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Use one GPU's defaults: packed sequences through the variable-length kernel, and decoding from CUDA graphs.

    SFT offloads its optimizer to the host, and engine=auto configures the reward model. Sampled tokens may differ from
    those in fp32: only PPO's first rollout has the entropy of the reference run. In each step the host waits for the
    device once for an update. PPO also waits for the scores of each model and for each round of decode steps.
    """
    on_cpu, in_bf16 = cpu_runs
    first, later = tmp_path / "first", tmp_path / "later"
    offloaded = tiny_config(**CHECKED, engine={"offload_optimizer": "cpu"})
    write_stage_configs(first, offloaded)
    copy_stages(on_cpu, later, "sft")
    more = {**SMALL["ppo"], "steps": 3, "eval_every": 0, "save_every": 9, "update_epochs": 1}
    ppo, auto = tiny_config(**{**UNCHECKED, "ppo": more}), tiny_config(**SMALL, engine={"auto": True})
    write_stage_configs(later, tiny_config(**UNCHECKED_SHORT), reward=auto, ppo=ppo)
    output = run_on_devices(first / "sft", later / "reward", later / "ppo")
    assert "padded" not in output and "engine=auto: as configured" in output
    for folder, stage in ((first, "sft"), (later, "reward")):
        compare(folder, on_cpu, stage, ("loss", "eval_loss"), rel=1e-2)
        compare(folder, in_bf16 if stage == "reward" else on_cpu, stage, ("grad_norm",), rel=1e-2, first=1)
    _, rollout, *_ = metrics(later, "ppo")
    assert rollout["entropy"] == pytest.approx(metrics(on_cpu, "ppo")[1]["entropy"], rel=1e-2)
    assert rollout["first_ratio_max_deviation"] < 1e-3 and rollout["generator_kl"] < 1e-3
    assert waits(later, "reward", step=2) == {"engine/parallel/dist.py:reduce_over_ranks": 1}
    actual = waits(later, "ppo", step=2)
    rounds = actual.pop("engine/generation/decode_step.py:wait")
    assert rounds <= 2  # of 3 tokens
    updates = 2  # minibatches
    assert actual == {
        "engine/parallel/dist.py:reduce_over_ranks": 2 * updates,  # actor, critic
        "engine/passes.py:to_host": 4,  # actor, reference, critic, reward model
        "engine/generation/inference_model.py:sync": 1,
        "step3_ppo/log.py:rollout_metrics": 1,
        "step3_ppo/log.py:_to_host": 1,
        "pipeline/tracking/metrics.py:phase": 3,
    }


def waits(run_dir: Path, stage: str, step: int) -> Counter[str]:
    """Return how often the host waited for the device in a step, by `file:function`."""
    lines = [json.loads(line) for line in (run_dir / stage / "waits.jsonl").read_text().splitlines()]
    return next(Counter(line["waits"]) for line in lines if line["step"] == step)


def test_two_devices_follow_one_cpu(cpu_runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Run PPO under ZeRO-3 with its optimizers on the host, and SFT under pipeline parallelism.

    test_parity.py runs every stage on two ranks on CPUs.
    """
    on_cpu, _ = cpu_runs
    sharded, staged = tmp_path / "sharded", tmp_path / "staged"
    offloaded = {"dtype": "fp32", "zero_stage": 3, "offload_optimizer": "cpu"}
    copy_stages(on_cpu, sharded, "sft", "reward")
    write_stage_configs(sharded, tiny_config(**UNCHECKED_SHORT, engine=offloaded))
    write_stage_configs(staged, tiny_config(**UNCHECKED_SHORT, engine={"dtype": "fp32", "pipeline_parallel": 2}))
    run_on_devices(sharded / "ppo", staged / "sft", ranks=2)
    for folder, stage in ((sharded, "ppo"), (staged, "sft")):
        compare(folder, on_cpu, stage, (*CURVES[stage], "grad_norm"), rel=1e-4)
