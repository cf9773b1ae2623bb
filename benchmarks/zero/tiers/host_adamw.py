"""The host's AdamW step over 100 M parameters with the 16-bit write-back, against torch's fused AdamW and a cast.

And against DeepSpeed's CPU Adam and a cast, in its own environment (beside_deepspeed), step by step in turn.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from benchmarks.measure import BenchFailed, in_turn, median, spread
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.record import ROOT, Result
from engine import EngineConfig, OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist

PARAMETERS = [2**24] * 6  # 100.7 M
PAUSE = 0.05  # seconds before a step: the threads of the one before it spin on for a while
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, decay="all", max_grad_norm=0.0)


def measure(rounds: int) -> Result:
    """Alternating steps on the same gradients, fp32 as torch's takes them."""
    dist.start("host", device="cpu")
    with _deepspeed() as peer:
        cases: dict[str, Callable[[], float]] = {
            "ours": partial(_timed, _ours()),
            "torch": partial(_timed, _torch()),
            "deepspeed": peer,
        }
        in_turn(cases, 2)
        seconds = in_turn(cases, max(rounds, 9))
    ours, theirs = median(seconds["ours"]), median(seconds["torch"])
    return Result(
        bench="zero",
        case="host_adamw",
        ours=1e3 * ours,
        peer=1e3 * theirs,
        unit="ms a step",
        lower_is_better=True,
        detail={
            "parameters": sum(PARAMETERS),
            "threads": torch.get_num_threads(),
            "peer": "torch.optim.AdamW(fused=True), then a cast",
            "at_most": 1.05,
            "spread": spread(seconds["ours"]),
            "peer_spread": spread(seconds["torch"]),
            "of_torch": ours / theirs,
            "deepspeed": 1e3 * median(seconds["deepspeed"]),
            "of_deepspeed": ours / median(seconds["deepspeed"]),
            "best": {k: 1e3 * min(v) for k, v in seconds.items()},
            "gb_per_second": 30 * sum(PARAMETERS) / ours / 1e9,
        },
    )


@contextmanager
def _deepspeed() -> Iterator[Callable[[], float]]:
    """A function that makes DeepSpeed's process take a step, and says how long that took. Raises BenchFailed."""
    words = [str(environment("deepspeed", DEEPSPEED)), "-m", "benchmarks.zero.tiers.their_adam"]
    peer = subprocess.Popen(
        [*words, *map(str, PARAMETERS)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert peer.stdin is not None and peer.stdout is not None
    source, sink = peer.stdout, peer.stdin
    try:
        while (line := source.readline()).strip() != "ready":
            if not line:
                raise BenchFailed(f"DeepSpeed's CPU Adam did not start (status {peer.wait()}); it needs a C++ compiler")

        def step() -> float:
            time.sleep(PAUSE)
            sink.write("step\n")
            sink.flush()
            return float(source.readline())

        yield step
    finally:
        peer.kill()


def _timed(step: Callable[[], None]) -> float:
    time.sleep(PAUSE)
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
    with optimizer.initializing():
        pass
    gradients, tier = _gradients(), optimizer.tiers[0]

    def step() -> None:
        for shard, gradient in enumerate(gradients):
            tier.gradients.add(shard, gradient)
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
