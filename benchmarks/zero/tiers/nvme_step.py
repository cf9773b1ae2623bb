"""The optimizer step from files, against a plain sequential direct read and write of the same bytes."""

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.measure import in_turn, median, spread
from benchmarks.record import Result
from benchmarks.zero.tiers.disk import folder
from engine import EngineConfig, OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist

PARAMETERS = [2**24] * 10  # 168 M, 2 GB of states
BYTES = 12 * sum(PARAMETERS)  # read, and written
REQUEST = 16 * 2**20
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, decay="all", max_grad_norm=0.0)


def measure(rounds: int) -> Result:
    """In turn: a step, and a read and a write of as many bytes. Bandwidth is both directions' bytes a second."""
    dist.start("nvme", device="cpu")
    step, file = _step(), _file()
    try:
        step()  # writes moments for the first time
        cases = {"ours": partial(_timed, step), "plain": partial(_timed, partial(_plain, file))}
        seconds = in_turn(cases, rounds)
    finally:
        os.close(file)
    rate = {name: 2 * BYTES / median(times) / 1e9 for name, times in seconds.items()}
    return Result(
        bench="zero",
        case="nvme_step",
        ours=rate["ours"],
        peer=rate["plain"],
        unit="GB/s",
        lower_is_better=False,
        detail={
            "parameters": sum(PARAMETERS),
            "gb_read_and_written": 2 * BYTES / 1e9,
            "at_least": 0.8,
            "peer": f"one thread, O_DIRECT, {REQUEST >> 20} MiB requests: all read, then all written",
            "spread": spread(seconds["ours"]),
            "peer_spread": spread(seconds["plain"]),
        },
    )


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _step() -> Callable[[], None]:
    """A whole step, until the last byte is in the file."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in PARAMETERS)
    config = EngineConfig(offload_optimizer="nvme", nvme_path=folder())
    optimizer = OffloadedOptimizer(module, OPTIMIZER, config)
    with optimizer.initializing():
        pass
    torch.manual_seed(2)
    gradients = [(torch.randn(size) * 1e-3).bfloat16() for size in PARAMETERS]
    tier = optimizer.tiers[0]

    def step() -> None:
        for shard, gradient in enumerate(gradients):
            tier.gradients.add(shard, gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _file() -> int:
    """A file of as many bytes, written once, without a name."""
    descriptor, path = tempfile.mkstemp(dir=folder())
    os.posix_fallocate(descriptor, 0, BYTES)
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    os.close(descriptor)
    os.unlink(path)
    _through(direct, os.pwritev)
    return direct


def _plain(file: int) -> None:
    _through(file, os.preadv)
    _through(file, os.pwritev)


def _through(file: int, move: Callable[[int, list[memoryview], int], int]) -> None:
    view = memoryview(mmap.mmap(-1, REQUEST))  # starts at a page, as direct I/O needs
    for start in range(0, BYTES, REQUEST):
        assert move(file, [view], start) == REQUEST
