"""Parameters that only some ranks, some micro-batches or no forward uses get the weights of a plain PyTorch loop."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.parallel import dist
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

ADAMW = OptimizerConfig(lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.5, decay="all", max_grad_norm=0.5)
# The expert of each row of a step. Two ranks have the even and the odd rows. No row uses expert 4.
ROUTES = [[0, 1, 0, 1, 2, 1, 2, 1], [2, 1, 0, 3, 0, 3, 0, 3], [0, 0, 0, 0, 0, 0, 0, 0]]
LAYOUTS: list[dict[str, Any]] = [
    *(
        {"zero_stage": stage, "gradient_accumulation": steps}
        for stage, steps in ((0, 2), (1, 1), (2, 2), (3, 1), (3, 2))
    ),
    *({"zero_stage": stage, "gradient_accumulation": 2, "dtype": "bf16"} for stage in (0, 1)),
    {"zero_stage": 3, "offload_optimizer": "cpu"},
    {"zero_stage": 2, "offload_optimizer": "nvme", "offload_ratio": 0.5, "gradient_accumulation": 2},
]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        out = x + self.nothing.sum()
        for number, expert in enumerate(self.each):
            rows = (routes == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])).to(out.dtype))
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, routes)
        return self.head(x)  # type: ignore[no-any-return]


def seeded_model() -> nn.Module:
    torch.manual_seed(1)
    return Routed()


def batch(step: int) -> tuple[Tensor, Tensor]:
    routes = torch.tensor(ROUTES[step])
    return torch.randn(len(routes), 4, generator=torch.Generator().manual_seed(step)), routes


def trained(layout: dict[str, Any], seen: list[Any]) -> dict[str, Tensor]:
    config = EngineConfig(**{"dtype": "fp32", **layout})
    engine, world = initialize(seeded_model(), config, optimizer=ADAMW), dist.world()
    seen.append(weakref.ref(engine.module))
    for step in range(len(ROUTES)):
        x, routes = (part[world.rank :: world.size].chunk(config.gradient_accumulation) for part in batch(step))
        for rows, to in zip(x, routes, strict=True):
            engine.backward(engine(rows, to).float().square().mean())
            engine(rows, to)  # a forward between backward and step must leave no state
            engine.step()
        for rows, to in zip(x, routes, strict=True) if step == 0 else ():  # only a skipped step uses expert 4
            engine.backward(engine(torch.full_like(rows, torch.nan), torch.full_like(to, 4)).float().sum())
            engine.step()
    return full_weights(engine)


def all_layouts() -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    seen: list[Any] = []
    actual = [trained(layout, seen) for layout in LAYOUTS]
    gc.collect()
    assert not any(module() is not None for module in seen), "an engine without references is not freed"
    return actual


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.5)
    for step in range(len(ROUTES)):
        model(*batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(actual: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    start = dict(seeded_model().named_parameters())
    for layout, weights in zip(LAYOUTS, actual, strict=True):
        tolerance = 0.03 if layout.get("dtype") == "bf16" else 1e-5
        for name, weight in expected.items():
            torch.testing.assert_close(
                weights[name], weight, atol=tolerance, rtol=0.0, msg=lambda m, at=(layout, name): f"{at}: {m}"
            )
        assert torch.equal(weights["blocks.0.each.4.weight"], start["blocks.0.each.4.weight"])


def test_one_rank(expected: dict[str, Tensor]) -> None:
    check(all_layouts(), expected)


def test_two_ranks_that_use_different_experts(expected: dict[str, Tensor]) -> None:
    for actual in run_ranks(all_layouts, 2):
        check(actual, expected)
