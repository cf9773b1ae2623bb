"""ZeRO stages, ranks and micro-batches give the losses and weights of a plain loop in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig
from engine.engine import Engine
from engine.parallel import dist, dtensors
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

STEPS, ROWS, WIDTH = 4, 8, 12
OPTIMIZER = OptimizerConfig(lr=0.02, total_steps=STEPS, warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5)


class Net(nn.Module):
    """A stem, blocks in a ModuleList, and a head tied to the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def seeded_net() -> Net:
    torch.manual_seed(3)
    return Net()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, ROWS, WIDTH, generator=generator), torch.randn(STEPS, ROWS, WIDTH, generator=generator)


def squared_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float | Tensor]]:
    return (module(batch[0]) - batch[1]).square().sum(), {"rows": float(len(batch[0]))}


def train(
    zero_stage: int, dtype: str, micro: int, checkpointing: bool = False
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, gradient norms and final weights of STEPS updates. Each of the W ranks has every W-th row."""
    torch.set_num_threads(1)
    config = EngineConfig(zero_stage=zero_stage, dtype=dtype, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    engine = Engine(seeded_net(), config, optimizer=OPTIMIZER)
    inputs, targets = data()
    world, losses, norms = dist.world(), [], []
    for x, y in zip(inputs, targets, strict=True):
        local = (x[world.rank :: world.size], y[world.rank :: world.size])
        batches = list(zip(local[0].chunk(micro), local[1].chunk(micro), strict=True))
        update = engine.update(batches, squared_error, ROWS)
        assert update.sums["rows"] == ROWS
        losses.append(update.loss)
        norms.append(update.grad_norm)
    return losses, norms, full_weights(engine)


def train_all(sizes: list[tuple[int, int]]) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    return [train(stage, "fp32", micro, checkpointing=stage == 3) for stage, micro in sizes]


def plain() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train by hand in float64 with AdamW, warm-up, cosine schedule and clipping."""
    net = seeded_net().double()
    state = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in net.named_parameters()}
    inputs, targets = (t.double() for t in data())
    losses, norms = [], []
    for step, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        loss = (net(x) - y).square().sum() / ROWS
        net.zero_grad()
        loss.backward()
        norm = sum(p.grad.square().sum() for p in net.parameters()).sqrt()
        lr = 0.02 if step < 1 else 0.02 * 0.5 * (1 + torch.cos(torch.tensor((step - 1) / 3 * torch.pi))).item()
        for name, p in net.named_parameters():
            grad = p.grad * min(1.0, 0.5 / (norm.item() + 1e-6))
            first, second = state[name]
            first.mul_(0.9).add_(grad, alpha=0.1)
            second.mul_(0.95).add_(grad**2, alpha=0.05)
            corrected = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            decay = 0.1 if p.ndim >= 2 else 0.0
            p.data.mul_(1 - lr * decay).sub_(lr * corrected)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, {name: p.detach().float() for name, p in net.named_parameters()}


def check(actual: tuple[list[float], list[float], dict[str, Tensor]]) -> None:
    losses, norms, weights = plain()
    assert actual[0] == pytest.approx(losses, rel=1e-5)
    assert actual[1] == pytest.approx(norms, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(actual[2][name], weight, atol=2e-5, rtol=1e-4)


LAYOUTS = [(0, 1), (1, 2), (2, 2), (3, 2), (0, 4)]
OVERFLOWING: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)), {"zero_stage": 2, "offload_optimizer": "cpu"},
]  # fmt: skip
Curves = tuple[list[float], list[float], dict[str, Tensor]]
Overflow = tuple[list[tuple[bool, float]], bool, int, Tensor]
Rank = tuple[list[Curves], list[Overflow], list[bool], list[dict[str, Tensor]]]


def on_a_rank() -> Rank:
    overflows = [overflow_on_one_rank(layout) for layout in OVERFLOWING]
    after_inference = [trains_after_inference_mode(stage) for stage in (0, 3)]
    return train_all(LAYOUTS), overflows, after_inference, weights_with_a_seed_of_each_rank()


@pytest.fixture(scope="module")
def ranks() -> list[Rank]:
    return run_ranks(on_a_rank, 2)


def test_one_rank_equals_float64_by_hand() -> None:
    for result in train_all(LAYOUTS):
        check(result)


def test_two_ranks_equal_float64_by_hand(ranks: list[Rank]) -> None:
    for results, *_ in ranks:
        for result in results:
            check(result)


def overflow_on_one_rank(layout: dict[str, Any]) -> Overflow:
    """Run two steps in which the last rank overflows, then steps until the loss scale is small enough."""
    engine = Engine(seeded_net(), EngineConfig(dtype="fp16", **layout), optimizer=OPTIMIZER)
    world, (inputs, targets) = dist.world(), data()

    def weights() -> Tensor:
        return torch.cat([dtensors.full_tensor(p.detach()).flatten().float() for p in engine.module.parameters()])

    before, steps = weights(), []
    x, y = inputs[0][world.rank :: world.size], targets[0][world.rank :: world.size]
    for _ in range(2):
        much = 6e4 if world.rank == world.size - 1 else 1.0
        steps.append((engine.update([(x * much, y)], squared_error, ROWS).skipped, engine.scaler.scale))
    unchanged = torch.equal(weights(), before)
    steps += [(engine.update([(x, y)], squared_error, ROWS).skipped, engine.scaler.scale) for _ in range(4)]
    return steps, unchanged, engine.scaler.skipped, weights()


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: list[Rank]) -> None:
    for first, second in zip(*(overflows for _, overflows, *_ in ranks), strict=True):
        assert first[:3] == second[:3] and torch.equal(first[3], second[3])
        steps, unchanged, counted, _ = first
        assert steps[:2] == [(True, 2.0**16), (True, 2.0**15)] and unchanged
        assert not steps[-1][0] and counted == sum(skipped for skipped, _ in steps)


def trains_after_inference_mode(zero_stage: int) -> bool:
    """Return whether a first forward in inference mode changes no update."""
    inputs, targets = data()
    weights = []
    for mode in (torch.inference_mode, torch.no_grad):
        engine = Engine(seeded_net(), EngineConfig(zero_stage=zero_stage, dtype="bf16"), optimizer=OPTIMIZER)
        with mode():
            engine(inputs[0])
        engine.update([(x, y) for x, y in zip(inputs, targets, strict=True)], squared_error, ROWS)
        weights.append(torch.cat([dtensors.local(p.detach()).flatten() for p in engine.module.parameters()]))
    return torch.equal(*weights)


def test_a_first_forward_in_inference_mode_changes_no_update(ranks: list[Rank]) -> None:
    assert trains_after_inference_mode(0)
    assert all(equal for _, _, results, _ in ranks for equal in results)


OTHER_SEEDS: list[dict[str, Any]] = [
    {}, {"zero_stage": 3}, {"zero_stage": 3, "shard_ranks": 1}, {"offload_optimizer": "cpu"}, {"dtype": "bf16"},
]  # fmt: skip


def weights_with_a_seed_of_each_rank() -> list[dict[str, Tensor]]:
    """Return the weights after a step of modules that each rank has initialized with another seed."""
    weights = []
    for layout in OTHER_SEEDS:
        torch.manual_seed(3 + dist.world().rank)
        engine = Engine(Net(), EngineConfig(**{"dtype": "fp32"} | layout), optimizer=OPTIMIZER)
        engine.update([(data()[0][0], data()[1][0])], squared_error, ROWS * dist.world().size)
        weights.append(full_weights(engine))
    return weights


def test_all_ranks_start_with_the_weights_of_the_first_one(ranks: list[Rank]) -> None:
    for *_, results in ranks:
        for actual, expected in zip(results, weights_with_a_seed_of_each_rank(), strict=True):
            for name, weight in expected.items():
                torch.testing.assert_close(actual[name], weight, atol=1e-5, rtol=1e-5)


def test_bf16_with_fp32_masters_follows_fp32() -> None:
    losses, _, weights = train(0, "bf16", 1)
    assert losses == pytest.approx(plain()[0], rel=0.03)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
