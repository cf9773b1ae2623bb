"""Learning rates against closed forms, and the parameters that are decayed."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from engine import EngineConfig, OptimizerConfig, optim
from engine.optimizer_step import learning_rate


def rates(**keys: object) -> list[float]:
    config = OptimizerConfig(lr=2.0, total_steps=20, **keys)  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(22)]


def test_constant() -> None:
    assert rates(schedule="constant") == [2.0] * 22
    assert rates(schedule="constant", warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("warmup", [0, 4, 20])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_linear_is_a_straight_line_from_the_peak_to_the_end(warmup: int, final: float) -> None:
    actual = rates(schedule="linear", warmup_steps=warmup, final_lr_ratio=final)
    for step, rate in enumerate(actual):
        if step < warmup:
            expected = 2.0 * (step + 1) / warmup
        elif warmup == 20:
            expected = 2.0 if step == 20 else 2.0 * final
        else:
            remaining = max(0, 20 - step) / (20 - warmup)
            expected = 2.0 * final + (2.0 - 2.0 * final) * remaining
        assert rate == pytest.approx(expected, abs=1e-12), step
    assert max(actual) == pytest.approx(2.0) and actual[-1] == pytest.approx(2.0 * final)


def test_cosine() -> None:
    actual = rates(schedule="cosine", warmup_steps=4, final_lr_ratio=0.1)
    assert actual[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    for step in range(4, 21):
        assert actual[step] == pytest.approx(0.2 + 1.8 * math.cos(math.pi / 2 * (step - 4) / 16) ** 2)
    assert actual[12] == pytest.approx(1.1)  # the middle step has the mean of peak and final rate
    assert actual[20] == actual[21] == pytest.approx(0.2)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="lr must be"):
        OptimizerConfig(lr=-1.0, total_steps=1)
    with pytest.raises(ValueError, match="total_steps"):
        OptimizerConfig(lr=1.0, total_steps=0)


class Mixed(nn.Module):
    """A module with tied matrices, stacked matrices, vectors, a scalar and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.experts = nn.Parameter(torch.randn(2, 3, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=True)
        self.head.weight = self.embed.weight


def test_only_matrices_are_decayed_and_only_once() -> None:
    module = Mixed()
    built = optim.build(module, OptimizerConfig(lr=0.1, total_steps=1, weight_decay=0.3, eps=1e-5, betas=(0.8, 0.9)))
    decayed = {id(p) for group in built.param_groups if group["weight_decay"] == 0.3 for p in group["params"]}
    plain = {id(p) for group in built.param_groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert decayed == {id(module.embed.weight), id(module.experts)}
    assert plain == {id(module.norm.weight), id(module.norm.bias), id(module.scale), id(module.head.bias)}
    assert sum(len(group["params"]) for group in built.param_groups) == 6
    assert all((group["eps"], group["betas"]) == (1e-5, (0.8, 0.9)) for group in built.param_groups)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (EngineConfig, {"dtype": "bfloat16"}, "dtype must be bf16, fp16 or fp32, not bfloat16"),
        (EngineConfig, {"offload_optimizer": "NVME"}, "offload_optimizer must be none, cpu or nvme, not NVME"),
        (EngineConfig, {"states": "fp16"}, "states must be fp32 or bf16, not fp16"),
        (
            OptimizerConfig,
            {"lr": 1.0, "schedule": "cosinus"},
            "schedule must be constant, linear or cosine, not cosinus",
        ),
        (OptimizerConfig, {"lr": 1.0, "decay": "none"}, "decay must be matrices or all, not none"),
    ],
)
def test_values_that_no_choice_has_are_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)
