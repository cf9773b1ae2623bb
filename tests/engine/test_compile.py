"""torch.compile around and inside an engine: two ranks under ZeRO 3 train like the plain module."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from engine import EngineConfig, OptimizerConfig, initialize
from engine.parallel import dist, dtensors
from tests.ranks import run_ranks

Made = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trace(module: nn.Module) -> nn.Module:
    """Compile a module in place. This backend traces graphs, and runs no compiler."""
    nn.Module.compile(module, backend="aot_eager")
    return module


WAYS: dict[str, tuple[Made, bool]] = {
    "plain": (lambda module: module, False),
    "compile_blocks": (lambda module: module, True),
    "module.compile()": (trace, False),
    "torch.compile(module)": (lambda module: torch.compile(module, backend="aot_eager"), False),  # type: ignore[list-item]
}


def train(make: Made, compile_blocks: bool) -> tuple[list[Tensor], str, int]:
    """Return the weights after a step, the name of the first one, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    config = EngineConfig(zero_stage=3, dtype="fp32", compile_blocks=compile_blocks)
    engine = initialize(make(Net()), config, optimizer=OptimizerConfig(lr=0.1, name="sgd", max_grad_norm=0.0))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))[dist.world().rank :: 2]
    engine.backward(engine(x).square().mean())
    engine.step()
    named = [(name, dtensors.full_tensor(p.detach()).clone()) for name, p in engine.module.named_parameters()]
    return [weight for _, weight in named], named[0][0], counters["stats"]["unique_graphs"]


def train_all() -> dict[str, tuple[list[Tensor], str, int]]:
    torch.set_num_threads(1)
    with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        blocks = {"compile_blocks": train(*WAYS["compile_blocks"])}
    return blocks | {name: train(*how) for name, how in WAYS.items() if name not in blocks}


def test_two_ranks_train_compiled_modules_like_plain_ones() -> None:
    for results in run_ranks(train_all, 2):
        expected, _, graphs = results["plain"]
        assert graphs == 0
        for name, (weights, first, graphs) in results.items():
            assert graphs > 0 or name == "plain", f"{name}: nothing was compiled"
            assert first == ("_orig_mod." if "torch" in name else "") + "layers.0.linear.weight"
            torch.testing.assert_close(weights, expected, msg=name)
