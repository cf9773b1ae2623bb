from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import OptimizerConfig
from pipeline.config.schema import RolloutSection
from pipeline.config.stage_sections import SftSection
from pipeline.stages.start import log_steps, optimizer_config, prepare_generation, slow_precision
from tests.tiny import tiny_config


def test_the_keys_of_a_stage_reach_its_optimizer() -> None:
    keys: dict[str, Any] = {"lr": 0.1, "schedule": "linear", "final_lr_ratio": 0.3, "eps": 0.6, "max_grad_norm": 0.8}
    keys["weight_decay"] = 0.7
    expected = OptimizerConfig(total_steps=10, warmup_steps=2, betas=(0.4, 0.5), **keys)
    assert optimizer_config(SftSection(warmup=0.2, beta1=0.4, beta2=0.5, **keys), steps=10) == expected


def test_the_keys_of_the_rollout_reach_the_generator() -> None:
    keys: dict[str, Any] = {"tensor_parallel": 2, "stream": True, "parity_check_every": 7, "cache_bytes": 9}
    engine: Any = SimpleNamespace(flip=SimpleNamespace())
    prepare_generation(engine, RolloutSection(generator="vllm", **keys))
    assert vars(engine.flip) == {**keys, "uses_vllm": True}


def test_a_stage_prints_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    section = tiny_config().sft.model_copy(update={"batch_size": 64, "steps": None, "epochs": 1.0})
    log_steps("sft", section, 1, 85)
    assert capsys.readouterr() == (
        "sft: 1 step of 64 conversations, 0.75 passes over 85\n",
        "warning: sft: 1 step will hardly change the model: for 20 steps set sft.epochs=16 or a smaller "
        "sft.batch_size, or add data\n",
    )
    log_steps("ppo", section, 2, 128)
    assert "ppo: 2 rollouts will hardly change the model: for 20 rollouts set" in capsys.readouterr().err
    log_steps("sft", section.model_copy(update={"steps": 2}), 2, 85)
    log_steps("ppo", section, 20, 1280)
    log_steps("sft", section, 375, 139)
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == "sft: 375 steps of 64 conversations, 173 passes over 139"
    assert "\nppo: 20 rollouts of 64 prompts, 1 pass over 1280\n" in output.out and output.err == ""


def test_kto_counts_answers(capsys: pytest.CaptureFixture[str]) -> None:
    section = tiny_config(dpo={"loss": "kto", "batch_size": 64, "steps": 3}).dpo
    log_steps("dpo", section, 3, 216)
    assert capsys.readouterr().out == "dpo: 3 steps of 64 answers, 0.89 passes over 216\n"


def test_a_stage_that_its_epochs_end_names_both_keys(capsys: pytest.CaptureFixture[str]) -> None:
    section = tiny_config().ppo.model_copy(update={"batch_size": 32, "steps": 15, "epochs": 1.0})
    log_steps("ppo", section, 11, 366)
    assert capsys.readouterr().out == (
        "ppo: 11 rollouts of 32 prompts, 0.96 passes over 366; ppo.epochs=1 ends before ppo.steps=15: "
        "set ppo.epochs=2\n"
    )


def test_a_precision_that_is_slow_on_this_cpu_causes_a_warning() -> None:
    rates = {torch.float32: 100.0, torch.bfloat16: 20.0, torch.float16: 80.0}
    assert slow_precision("bf16", rates.__getitem__) == (
        "this processor multiplies bf16 matrices at 20% of the speed of fp32: engine.dtype=fp32 is faster"
    )
    assert slow_precision("fp16", rates.__getitem__) is None
    assert slow_precision("fp32", rates.__getitem__) is None
