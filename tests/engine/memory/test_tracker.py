"""Measured bytes by owner of a small engine against sums by hand and the prediction."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.config import Precision
from engine.memory import ModelShape, Workload, trained_states

WIDTH, ROWS, BLOCKS = 32, 16, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return module(x).float().sum(), {}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_by_owner(dtype: Precision) -> None:
    """tests/test_parity.py compares the states on two ranks."""
    config = EngineConfig(dtype=dtype)
    engine, x = initialize(Net(), config, optimizer=OptimizerConfig(lr=1e-3)), torch.randn(ROWS, WIDTH)
    for _ in range(2):
        engine.update([x, x], loss, 2.0 * ROWS)
    actual = engine.memory_tracker.peaks["train"]
    block = WIDTH * WIDTH + WIDTH
    states = trained_states(ModelShape((BLOCKS + 1) * block, root=block, block=block), Workload(config))
    assert actual["parameters"] == pytest.approx(states.parameters, rel=0.05)
    assert actual["optimizer"] == pytest.approx(states.optimizer, rel=0.05)
    size = 4 if dtype == "fp32" else 2
    # Each linear layer saves its input, and each tanh saves its output, which is the next linear layer's input.
    expected = ROWS * WIDTH * (2 + 2 * BLOCKS - BLOCKS) * size
    assert actual["activations"] == pytest.approx(expected, rel=0.3)


PLACES: list[dict[str, Any]] = [
    {"zero_stage": 2, "offload_optimizer": "cpu"},
    {"zero_stage": 2, "offload_optimizer": "nvme"},
    {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    {"zero_stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"},
    {"zero_stage": 3, "offload_parameters": "cpu"},
]


@pytest.mark.parametrize("positions", PLACES, ids=lambda positions: " ".join(map(str, positions.values())))
def test_offloaded_states_are_counted_on_the_host_and_in_files(positions: dict[str, Any]) -> None:
    """Shards, masters, moments, gradients before the step, and buffers of sub-groups equal the prediction."""
    wide, sub_group = 192, 2**14  # a matrix has many file blocks, the last of them incomplete
    nets = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(6))
    total, block = 6 * wide * wide, wide * wide
    config = EngineConfig(dtype="bf16", sub_group_size=sub_group, **positions)
    engine = initialize(nn.Sequential(*nets), config, optimizer=OptimizerConfig(lr=1e-3))
    x = torch.randn(2, wide)
    engine.update([x, x], loss, 4.0)
    engine.update([x, x], loss, 4.0)
    actual = engine.memory_tracker.peaks["train"]
    states = trained_states(ModelShape(total, root=total, block=block), Workload(config))
    assert actual.get("parameters", 0) == pytest.approx(states.parameters, rel=0.05)
    assert actual.get("optimizer", 0) == states.optimizer
    assert actual.get("host", 0) == pytest.approx(states.host, rel=0.05)
    assert actual.get("nvme", 0) == pytest.approx(states.nvme, rel=0.05)
