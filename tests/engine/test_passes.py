"""Scoring and learning from one forward: the numbers of two, however many ranks share, and whatever fails."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.engine import Engine
from engine.oom import PassOutOfMemory
from engine.parallel import dist, dtensors
from tests.ranks import run_ranks

WIDTH, STEPS = 8, 3
WAYS = [("forward", 1), ("forward", 2), ("loss", 1), ("backward", 1), ("backward", 3)]


@dataclass(frozen=True)
class Rows:
    """Rows (n, WIDTH)."""

    x: Tensor


class Net(nn.Module):
    """Blocks with dropout, and a running statistic: a forward changes random state and buffers."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """Fails in forward or backward if `fails` returns True."""

    fails: Callable[[str, int], bool] = staticmethod(lambda where, rows: False)

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        if Block.fails("forward", len(x)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        x = self.drop(torch.tanh(self.map(x)))
        if x.requires_grad:
            x.register_hook(self._backward)
        return x

    def _backward(self, gradient: Tensor) -> None:
        if Block.fails("backward", len(gradient)):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")


def loss(module: nn.Module, rows: Rows) -> tuple[Tensor, dict[str, float | Tensor]]:
    out = module(rows.x)
    if Block.fails("loss", len(rows.x)):
        raise MemoryError
    return (out - 1.0).square().sum(), {"rows": float(len(rows.x))}


def engine_of(stage: int, drop: float = 0.0, dtype: str = "fp32") -> Engine:
    torch.manual_seed(3)
    config = OptimizerConfig(lr=0.05, max_grad_norm=1.0)
    return initialize(Net(drop), EngineConfig(zero_stage=stage, dtype=dtype), optimizer=config)  # type: ignore[arg-type]


def batches(step: int, sizes: list[int]) -> list[Rows]:
    """This rank's share of 16 rows, in micro-batches of these sizes."""
    world = dist.world()
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))[world.rank :: world.size]
    return [Rows(part) for part in rows.split(sizes)]


class Failing:
    """Inside the context, micro-batches of more than `most` rows fail at the `call`-th block on the chosen ranks."""

    def __init__(self, where: str, most: int, *, call: int = 1, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.where, self.most, self.call, self.ranks = where, most, call, ranks

    def __enter__(self) -> None:
        calls = {"large": 0}

        def fails(where: str, rows: int) -> bool:
            if where != self.where or rows <= self.most or dist.world().rank not in self.ranks:
                return False
            calls["large"] += 1
            return calls["large"] % self.call == 0

        Block.fails = staticmethod(fails)

    def __exit__(self, *_: object) -> None:
        Block.fails = staticmethod(lambda where, rows: False)


def same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
    assert found["rows"] == wanted["rows"] == [16.0] * STEPS
    assert found["left"] == 0
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=tolerance, rtol=tolerance)


def rows_of(module: nn.Module, rows: Rows) -> list[Tensor]:
    return list(module(rows.x).square().sum(1))


def trained(stage: int, sizes: list[int], *, shares: bool, **others: Any) -> dict[str, Any]:
    """Each step scores its rows and learns from them; `shares` by one forward."""
    engine = engine_of(stage, **others)
    torch.manual_seed(5 + dist.world().rank)
    scores, updates, apart = list[float](), [], 0
    for step in range(STEPS):
        share = batches(step, sizes)
        found = engine.score_to_learn(share, rows_of) if shares else None
        if found is None:
            apart += 1
            found = engine.score(share, rows_of)
        scores += [score.item() for rows in found for score in rows]
        assert not any(score.requires_grad for rows in found for score in rows)
        updates.append(engine.update(share, loss, 16.0))
    weights = {name: dtensors.full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
    left = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return {
        "weights": weights, "losses": [u.loss for u in updates], "norms": [u.grad_norm for u in updates],
        "rows": [u.sums["rows"] for u in updates], "left": len(left), "scores": scores, "apart": apart,
        "seen": engine.module.seen.item(), "random": torch.rand(1).item(), "reduced": updates[-1].sent.reduce,
    }  # fmt: skip


def check(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    same(found, wanted, tolerance)
    assert found["scores"] == pytest.approx(wanted["scores"], rel=max(tolerance, 1e-6))
    assert found["seen"] == wanted["seen"] and found["random"] == wanted["random"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [[16], [7, 6, 2, 1]])
def test_one_rank(sizes: list[int], dtype: str) -> None:
    """The module's own count of what it saw in training says that one forward was made."""
    wanted = trained(2, sizes, shares=False, dtype=dtype)
    found = trained(2, sizes, shares=True, dtype=dtype)
    check(found, wanted, 0.0)
    assert found["apart"] == 0 and found["seen"] == 16 * STEPS and wanted["apart"] == STEPS


@pytest.mark.parametrize(("where", "call"), WAYS)
def test_memory_that_runs_out_while_graphs_are_held_is_said_so(where: str, call: int) -> None:
    """Smaller micro-batches would not help: the graphs of all of them are held."""
    engine = engine_of(0)
    share = batches(0, [7, 6, 2, 1])
    with Failing(where, 5, call=call), pytest.raises(PassOutOfMemory) as raised:
        engine.score_to_learn(share, rows_of)
        engine.update(share, loss, 16.0)
    assert raised.value.holds_graphs


def on_two_ranks() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    torch.set_num_threads(1)
    gc.freeze()
    found = []
    for stage in range(4):
        for sizes in ([8], [3, 3, 1, 1]):
            wanted = trained(stage, sizes, shares=False)
            shared = trained(stage, sizes, shares=True)
            assert shared["reduced"] == wanted["reduced"] > 0  # once a step, or once a micro-batch
            found.append((f"stage {stage} {sizes}", shared, wanted))
    return found


def test_two_ranks() -> None:
    for found in run_ranks(on_two_ranks, 2):
        for name, got, wanted in found:
            print(name)
            check(got, wanted, 1e-5)


def test_what_else_is_done_lets_go_of_forwards() -> None:
    """Scoring in between, other micro-batches: the update makes its own forwards, of the parameters as they are."""
    wanted, engine = trained(0, [16], shares=False, dtype="bf16"), engine_of(0, dtype="bf16")
    losses, forwards = [], list[bool]()
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    for step in range(STEPS):
        share = batches(step, [16])
        assert engine.score_to_learn(batches(9, [16]) if step == 1 else share, rows_of) is not None
        if step == 0:
            engine.score(share, rows_of)
        elif step == 2:
            assert engine.score_to_learn(share, rows_of) is not None
        losses.append(engine.update(share, loss, 16.0).loss)
    assert losses == wanted["losses"] and engine.module.seen.item() == wanted["seen"]
    assert forwards == [True, False, True, True, True, True, True]  # of the third step two that were kept, none else
