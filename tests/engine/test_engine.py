"""An update reads all its numbers from the device in one transfer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.parallel import dist
from tests.host_syncs import HostSyncCounter


def test_numbers_of_both_kinds_in_order() -> None:
    dist.start("test")
    values = [1.5, torch.tensor(2.0**-30), torch.tensor(3), 4, torch.tensor(True)]
    assert dist.reduce_over_ranks(values[:2], values[2:]) == ([1.5, 2.0**-30], [3.0, 4.0, 1.0])
    assert dist.reduce_over_ranks([]) == ([], [])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_waits_for_the_device_once(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.start("test")
    engine = Engine(nn.Linear(4, 3), EngineConfig(dtype=dtype), optimizer=OptimizerConfig(lr=0.1))
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    micro_batches = [rows[:1], rows[1:2], rows[2:]]
    with engine.scoring() as module:  # a product of all four rows may round differently
        most = max(module(micro_batch).max().item() for micro_batch in micro_batches)
    calls: list[int] = []
    reduce = dist.reduce_over_ranks

    def counted(sums: Any, maxima: Any = ()) -> tuple[list[float], list[float]]:
        calls.append(len(sums) + len(maxima))
        return reduce(sums, maxima)

    def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
        out = module(batch)
        sums = {"above": (out > 0).sum(), "rows": 1.0, "shares": 1.0 / len(batch)}
        return out.square().sum(), {"largest": out.detach().max(), **sums}

    monkeypatch.setattr(dist, "reduce_over_ranks", counted)
    with HostSyncCounter() as host_syncs:
        update = engine.update(micro_batches, loss, 4.0, maxima=("largest", "shares"))
    assert not host_syncs.counts and calls == [7]  # 3 sums, 2 maxima, the norm, and the number of unused parameters
    assert update.sums["rows"] == 3.0 and update.grad_norm > 0
    assert update.maxima == {"largest": most, "shares": 1.0} and update.sums.keys() == {"above", "rows"}
