"""Measured bytes of offloaded states against the prediction. For other states: test_pipeline_stages.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.memory import ModelShape, Workload, trained_states


def loss(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return module(x).float().sum(), {}


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
