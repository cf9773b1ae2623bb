"""What an update reads from the device: everything at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine import engine as engine_file
from engine.figures import numbers
from engine.parallel import dist
from tests.reads import Reads


def test_numbers_of_both_kinds_in_order() -> None:
    dist.start("test")
    values = [1.5, torch.tensor(2.0**-30), torch.tensor(3), 4, torch.tensor(True)]
    assert numbers(values) == [1.5, 2.0**-30, 3.0, 4.0, 1.0]
    assert numbers([]) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_waits_for_the_device_once(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.start("test")
    engine = Engine(nn.Linear(4, 3), EngineConfig(dtype=dtype), optimizer=OptimizerConfig(lr=0.1))
    calls: list[int] = []

    def counted(values: Any) -> list[float]:
        calls.append(len(values))
        return numbers(values)

    def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
        out = module(batch)
        return out.square().sum(), {"largest": out.detach().max(), "above": (out > 0).sum(), "rows": 1.0}

    monkeypatch.setattr(engine_file, "numbers", counted)
    reads = Reads()
    with reads:
        update = engine.update([torch.ones(2, 4), torch.ones(1, 4)], loss, 3.0)
    assert not reads.found and calls == [5]
    assert update.sums["rows"] == 2.0 and update.grad_norm > 0
