"""Shared forwards for scoring and training give the numbers of separate forwards, also after errors; noted work."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.engine import Engine
from engine.generation.generator import Generator
from engine.generation.sampling import Sampling
from engine.oom import PassOutOfMemory
from engine.parallel import dist
from tests.engine.generation.families import build
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

WIDTH, STEPS = 8, 3
WAYS = [("forward", 1), ("forward", 2), ("loss", 1), ("backward", 1), ("backward", 3)]


@dataclass(frozen=True)
class Rows:
    """A batch of rows: (n, WIDTH)."""

    x: Tensor


class Net(nn.Module):
    """A net with dropout and a running statistic, so that a forward changes the random state and a buffer."""

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
    """A block that runs out of memory in forward or backward if `fails` returns True."""

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
    """Return this rank's share of 16 rows in micro-batches of these sizes."""
    world = dist.world()
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))[world.rank :: world.size]
    return [Rows(part) for part in rows.split(sizes)]


class Failing:
    """A context in which micro-batches of more than `most` rows fail at the `call`-th block on the chosen ranks."""

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


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert actual["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    assert actual["rows"] == expected["rows"] == [16.0] * STEPS
    assert actual["left"] == 0
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, atol=tolerance, rtol=tolerance)


def rows_of(module: nn.Module, rows: Rows) -> list[Tensor]:
    return list(module(rows.x).square().sum(1))


def trained(stage: int, sizes: list[int], *, shares: bool, **others: Any) -> dict[str, Any]:
    """Score the rows and train on them in each step, by one forward if `shares`."""
    engine = engine_of(stage, **others)
    torch.manual_seed(5 + dist.world().rank)
    scores, updates = list[float](), []
    for step in range(STEPS):
        share = batches(step, sizes)
        actual = (engine.score_to_learn if shares else engine.score)(share, rows_of)
        scores += [score.item() for rows in actual for score in rows]
        assert not any(score.requires_grad for rows in actual for score in rows)
        updates.append(engine.update(share, loss, 16.0))
    left = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return {
        "weights": full_weights(engine), "losses": [u.loss for u in updates], "norms": [u.grad_norm for u in updates],
        "rows": [u.sums["rows"] for u in updates], "left": len(left), "scores": scores,
        "seen": engine.module.seen.item(), "random": torch.rand(1).item(), "reduced": updates[-1].sent.reduce,
    }  # fmt: skip


def check(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert_equal(actual, expected, tolerance)
    assert actual["scores"] == pytest.approx(expected["scores"], rel=max(tolerance, 1e-6))
    assert actual["seen"] == expected["seen"] and actual["random"] == expected["random"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [[16], [7, 6, 2, 1]])
def test_one_rank(sizes: list[int], dtype: str) -> None:
    """The running statistic of the module counts the forwards in training mode: one with sharing."""
    expected = trained(2, sizes, shares=False, dtype=dtype)
    actual = trained(2, sizes, shares=True, dtype=dtype)
    check(actual, expected, 0.0)
    assert actual["seen"] == 16 * STEPS


@pytest.mark.parametrize(("where", "call"), WAYS)
def test_out_of_memory_with_shared_forwards_names_the_cause(where: str, call: int) -> None:
    """The graphs of all micro-batches exist at once, so smaller micro-batches would not help."""
    engine = engine_of(0)
    share = batches(0, [7, 6, 2, 1])
    with Failing(where, 5, call=call), pytest.raises(PassOutOfMemory) as raised:
        engine.score_to_learn(share, rows_of)
        engine.update(share, loss, 16.0)
    assert raised.value.holds_graphs


def on_two_ranks() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    torch.set_num_threads(1)
    gc.freeze()
    results = []
    for stage, sizes in ((0, [8]), (0, [5, 2, 1]), (1, [5, 2, 1]), (2, [5, 2, 1]), (3, [8]), (3, [5, 2, 1])):
        expected = trained(stage, sizes, shares=False)
        shared = trained(stage, sizes, shares=True)
        assert shared["reduced"] == expected["reduced"] > 0  # once a step, or once a micro-batch
        results.append((f"stage {stage} {sizes}", shared, expected))
    return results


def test_two_ranks() -> None:
    for actual in run_ranks(on_two_ranks, 2):
        for name, got, expected in actual:
            print(name)
            check(got, expected, 1e-5)


def test_other_passes_discard_the_shared_forwards() -> None:
    """After other scoring or other micro-batches, the update computes new forwards with the current parameters."""
    expected, engine = trained(0, [16], shares=False, dtype="bf16"), engine_of(0, dtype="bf16")
    losses, forwards = [], list[bool]()
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    for step in range(STEPS):
        share = batches(step, [16])
        engine.score_to_learn(batches(9, [16]) if step == 1 else share, rows_of)
        if step == 0:
            engine.score(share, rows_of)
        elif step == 2:
            engine.score_to_learn(share, rows_of)
        losses.append(engine.update(share, loss, 16.0).loss)
    assert losses == expected["losses"] and engine.module.seen.item() == expected["seen"]
    assert forwards == [True, False, True, True, True, True, True]  # only the two forwards of the third step are shared


def test_an_update_after_a_failed_shared_forward_is_complete() -> None:
    """The outputs of the forwards before the failure belong to other micro-batches."""
    expected, engine = engine_of(2).update(batches(0, [16]), loss, 16.0), engine_of(2)
    with Failing("forward", 5), pytest.raises(PassOutOfMemory):
        engine.score_to_learn(batches(1, [5, 11]), rows_of)
    assert engine.update(batches(0, [16]), loss, 16.0).loss == expected.loss


@pytest.mark.parametrize("use", ["save", "full_parameters", "adapter_parameters", "discard"])
def test_other_uses_discard_the_shared_forwards(use: str, tmp_path: Path) -> None:
    """They release the gathered parameters, which the graphs of the forwards need."""
    expected, engine = engine_of(0, dtype="bf16"), engine_of(0, dtype="bf16")
    share = batches(0, [16])
    engine.score_to_learn(share, rows_of)
    if use == "save":
        engine.save(tmp_path / "saved")
    else:
        list(getattr(engine, use)() or ())
    assert engine.update(share, loss, 16.0).grad_norm == expected.update(share, loss, 16.0).grad_norm


def test_a_step_of_backward_discards_the_shared_forwards() -> None:
    """Their graphs belong to the parameters before the step."""
    share, (other,) = batches(0, [16]), batches(1, [16])
    losses = []
    for shares in (False, True):
        engine = engine_of(0)
        if shares:
            engine.score_to_learn(share, rows_of)
        engine.backward(engine(other.x).square().mean())
        engine.step()
        losses.append(engine.update(share, loss, 16.0).loss)
    assert losses[0] == losses[1]


def test_averaging_starts_with_the_masters_after_a_forward() -> None:
    engine = engine_of(0, dtype="bf16")
    masters = dict(engine.module.named_parameters())
    engine(batches(0, [16])[0].x)
    engine.start_averaging(0.9)
    for name, master in masters.items():
        assert torch.equal(engine.average.tensors[name], master)


def test_each_micro_batch_and_each_decode_step_is_noted_for_a_watchdog() -> None:
    """A slow machine would count as hung if an update or a rollout were one piece of work."""
    notes, share = list[None](), batches(0, [6, 6, 4])

    def noted(work: Callable[[], object]) -> int:
        before = len(notes)
        work()
        return len(notes) - before

    engine, generator = engine_of(0), Generator(build("llama"), "cpu")
    dist.observe_work(lambda: notes.append(None))
    try:
        assert noted(lambda: engine.update(share, loss, 16.0)) == 3
        assert noted(lambda: engine.score(share, rows_of)) == 3
        assert noted(lambda: engine.score_to_learn(share, rows_of)) == 3
        assert noted(lambda: engine.update(share, loss, 16.0)) == 3
        answers = [(1, 2, 3)], Sampling(12, temperature=0), [0]
        assert noted(lambda: generator.generate(*answers)) >= 12
    finally:
        dist.observe_work(None)
