"""The host's AdamW step over 100 M parameters with the 16-bit write-back, against torch's fused AdamW and a cast."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.measure import in_turn, median, spread
from benchmarks.record import Result
from engine import EngineConfig, OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist

PARAMETERS = [2**24] * 6  # 100.7 M
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, decay="all", max_grad_norm=0.0)


def measure(rounds: int) -> Result:
    """Alternating steps on the same gradients, fp32 as torch's takes them."""
    dist.start("host", device="cpu")
    cases = {"ours": partial(_timed, _ours()), "torch": partial(_timed, _torch())}
    in_turn(cases, 2)
    seconds = in_turn(cases, max(rounds, 5))
    ours, theirs = median(seconds["ours"]), median(seconds["torch"])
    return Result(
        bench="zero", case="host_adamw", ours=1e3 * ours, peer=1e3 * theirs, unit="ms a step", lower_is_better=True,
        detail={
            "parameters": sum(PARAMETERS), "threads": torch.get_num_threads(),
            "peer": "torch.optim.AdamW(fused=True), then a cast", "at_most": 1.05,
            "spread": spread(seconds["ours"]), "peer_spread": spread(seconds["torch"]),
            "gb_per_second": 30 * sum(PARAMETERS) / ours / 1e9,
        },
    )  # fmt: skip


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _gradients() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(size) * 1e-3 for size in PARAMETERS]


def _ours() -> Callable[[], None]:
    """The whole step of an engine whose optimizer is on the host, from gradients that have arrived."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in PARAMETERS)
    optimizer = OffloadedOptimizer(module, OPTIMIZER, EngineConfig(offload_optimizer="cpu"))
    with optimizer.filling():
        pass
    gradients, tier = _gradients(), optimizer.tiers[0]

    def step() -> None:
        for shard, gradient in enumerate(gradients):
            tier.gradients.arrive(shard, gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torch() -> Callable[[], None]:
    masters = [nn.Parameter(torch.zeros(size)) for size in PARAMETERS]
    halves = [torch.zeros(size, dtype=torch.bfloat16) for size in PARAMETERS]
    for master, gradient in zip(masters, _gradients(), strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=OPTIMIZER.betas, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        for half, master in zip(halves, masters, strict=True):
            half.copy_(master)

    return step
