"""A step that ran out of memory ends as if it had been planned smaller: each ZeRO stage, one and two ranks."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.engine import Engine
from engine.healing import Portion
from engine.parallel import dist, dtensors
from tests.ranks import run_ranks

WIDTH, STEPS = 8, 3


@dataclass(frozen=True)
class Rows:
    """Rows (n, WIDTH), and whether they count."""

    x: Tensor
    counted: bool = True


def collate(rows: Sequence[Tensor]) -> Rows:
    return Rows(torch.cat(list(rows))) if len(rows) else Rows(torch.zeros(1, WIDTH), counted=False)


def portion(rows: Tensor, together: int = 1) -> Portion[Rows]:
    """`together` rows are one item, which can't be cut."""
    return Portion(rows.split(together), collate, lambda batch: len(batch.x))


class Net(nn.Module):
    """Blocks with dropout, and a running statistic: what a failed attempt could leave behind."""

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
    """Fails in forward or backward where told to."""

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
    weight = 1.0 if rows.counted else 0.0
    return weight * (out - 1.0).square().sum(), {"rows": weight * len(rows.x)}


def engine_of(stage: int, drop: float = 0.0, dtype: str = "fp32") -> Engine:
    torch.manual_seed(3)
    config = OptimizerConfig(lr=0.05, max_grad_norm=1.0)
    return initialize(Net(drop), EngineConfig(zero_stage=stage, dtype=dtype), optimizer=config)  # type: ignore[arg-type]


def batches(step: int, sizes: list[int]) -> list[Portion[Rows]]:
    """This rank's share of 16 rows, in micro-batches of these sizes."""
    world = dist.world()
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))[world.rank :: world.size]
    return [portion(part) for part in rows.split(sizes)]


def trained(stage: int, sizes: list[int], **others: Any) -> dict[str, Any]:
    engine = engine_of(stage, **others)
    torch.manual_seed(5 + dist.world().rank)
    updates = [engine.update(batches(step, sizes), loss, 16.0) for step in range(STEPS)]
    weights = {name: dtensors.full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
    left = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return {
        "weights": weights, "losses": [u.loss for u in updates], "norms": [u.grad_norm for u in updates],
        "rows": [u.sums["rows"] for u in updates], "seen": engine.module.seen.item(), "left": len(left),
        "times": engine.healer.times, "limit": engine.healer.limit, "random": torch.rand(1).item(),
    }  # fmt: skip


class Failing:
    """Within the block, micro-batches of more than `most` rows fail at the `call`-th block on the chosen ranks."""

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


WAYS = [("forward", 1), ("forward", 2), ("loss", 1), ("backward", 1), ("backward", 3)]


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(stage: int) -> None:
    whole = trained(stage, [16])
    for where, call in WAYS:
        with Failing(where, 5, call=call):
            healed = trained(stage, [16])
        same(healed, whole)
        assert healed["times"] == 2 and healed["limit"] == 4
        assert healed["seen"] == 16 * STEPS


def test_random_state_and_precision() -> None:
    """Halves that were planned, and halves that came of a failure, draw the same dropout."""
    planned = trained(2, [4, 4, 4, 4], drop=0.5, dtype="bf16")
    with Failing("backward", 4):
        healed = trained(2, [16], drop=0.5, dtype="bf16")
    same(healed, planned, 0.0)
    assert healed["random"] == planned["random"]


def on_two_ranks() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    torch.set_num_threads(1)
    gc.freeze()  # a failure collects garbage: there is none among what was imported
    found = []
    for stage in range(4):
        for (where, call), sizes in zip(WAYS, ([5, 3], [3, 3, 2], [8], [5, 3], [3, 3, 2]), strict=True):
            whole = trained(stage, sizes)
            ranks = (1,) if (stage + call) % 2 else (0, 1)
            with Failing(where, 2, call=call, ranks=ranks):
                healed = trained(stage, sizes)
            found.append((f"stage {stage} {sizes} {where} {call} {ranks}", healed, whole))
    return found


def test_two_ranks() -> None:
    for found in run_ranks(on_two_ranks, 2):
        for name, healed, whole in found:
            print(name)
            same(healed, whole)
            assert healed["times"] >= 1 and healed["limit"] <= 2, name


def hopeless() -> list[str]:
    said = []
    rows = torch.ones(8, WIDTH)
    for stage in (0, 3):
        with Failing("backward", 1, ranks=(dist.world().size - 1,)):
            try:
                engine_of(stage).update([portion(rows, together=2)], loss, 16.0)
            except ValueError as error:
                said.append(str(error))
    return said


def test_what_can_not_be_halved_ends_with_one_message() -> None:
    for said in (hopeless(), *run_ranks(hopeless, 2)):
        assert len(said) == 2
        for words in said:
            assert "one sequence of 2 tokens" in words and "engine.activation_checkpointing=true" in words


def test_scores_come_in_order_and_other_errors_pass() -> None:
    engine = engine_of(2)
    rows = [portion(torch.arange(5.0)[:, None].expand(5, WIDTH)), portion(torch.full((2, WIDTH), 9.0))]

    def firsts(module: nn.Module, batch: Rows) -> list[float]:
        module(batch.x)
        return batch.x[:, 0].tolist()

    with Failing("forward", 2):
        assert engine.score(rows, firsts) == [[0.0, 1.0, 2.0, 3.0, 4.0], [9.0, 9.0]]
    assert engine.healer.times == 2

    def wrong(module: nn.Module, batch: Rows) -> tuple[Tensor, dict[str, float | Tensor]]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.update(rows, wrong, 1.0)


def test_a_rehearsal_leaves_nothing_but_the_limit() -> None:
    rows = torch.randn(8, WIDTH)
    once = trained(2, [16], drop=0.5)
    engine = engine_of(2, drop=0.5)
    torch.manual_seed(5)
    with Failing("backward", 4):
        engine.rehearse(portion(rows), loss)
    assert engine.healer.limit == 4 and all(p.grad is None for p in engine.module.parameters())
    engine.healer.limit = None
    updates = [engine.update(batches(step, [16]), loss, 16.0) for step in range(STEPS)]
    assert [update.loss for update in updates] == once["losses"]
    assert engine.module.seen.item() == once["seen"]
