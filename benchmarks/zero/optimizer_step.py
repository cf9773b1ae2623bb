"""The step of the offloaded optimizer, on the CPU (`host_adamw`) and with its states in files (`nvme_step`).

`host_adamw` steps 100 M parameters and writes the bf16 parameters. It is compared with torch's fused AdamW followed by
a cast, and with DeepSpeed's CPU Adam followed by a cast, in DeepSpeed's own environment. `nvme_step` is compared with a
plain sequential read and write of the same bytes with direct I/O.
"""

import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.measure import BenchFailed, in_turn, median, spread
from benchmarks.peers.environments import DEEPSPEED, environment
from benchmarks.record import ROOT, Result
from benchmarks.zero.nvme import nvme_folder
from engine import EngineConfig, OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist

HOST_SIZES = [2**24] * 6  # 100.7 M parameters
NVME_SIZES = [2**24] * 10  # 168 M parameters, 2 GB of states
NVME_BYTES = 12 * sum(NVME_SIZES)  # read, and also written
REQUEST = 16 * 2**20
PAUSE = 0.05  # seconds before a step: the OpenMP threads of the previous step still spin for a moment
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1, decay="all", max_grad_norm=0.0)


def measure(rounds: int, case: str) -> Result:
    """Measure `host_adamw` or `nvme_step`. Raises BenchFailed if DeepSpeed does not start."""
    dist.start(case, device="cpu")
    return _host(rounds) if case == "host_adamw" else _nvme(rounds)


def _host(rounds: int) -> Result:
    """Return the milliseconds of a step. All sides take turns on the same gradients; torch's are fp32."""
    with _deepspeed_step() as deepspeed_step:
        cases: dict[str, Callable[[], float]] = {
            "ours": partial(_timed, _engine_step(EngineConfig(offload_optimizer="cpu"), _gradients(HOST_SIZES)), PAUSE),
            "torch": partial(_timed, _torch_step(), PAUSE),
            "deepspeed": deepspeed_step,
        }
        in_turn(cases, 2)
        seconds = in_turn(cases, max(rounds, 9))
    medians = {name: median(times) for name, times in seconds.items()}
    return Result(
        bench="zero",
        case="host_adamw",
        ours=1e3 * medians["ours"],
        peer=1e3 * medians["torch"],
        unit="ms a step",
        lower_is_better=True,
        detail={
            "parameters": sum(HOST_SIZES),
            "threads": torch.get_num_threads(),
            "peer": "torch.optim.AdamW(fused=True), then a cast",
            "at_most": 1.05,
            "spread": spread(seconds["ours"]),
            "peer_spread": spread(seconds["torch"]),
            "of_torch": medians["ours"] / medians["torch"],
            "deepspeed": 1e3 * medians["deepspeed"],
            "of_deepspeed": medians["ours"] / medians["deepspeed"],
            "best": {name: 1e3 * min(times) for name, times in seconds.items()},
            "gb_per_second": 30 * sum(HOST_SIZES) / medians["ours"] / 1e9,
        },
    )


def _nvme(rounds: int) -> Result:
    """Return the bandwidth of a step: bytes read and bytes written, per second."""
    gradients = [gradient.bfloat16() for gradient in _gradients(NVME_SIZES)]
    step = _engine_step(EngineConfig(offload_optimizer="nvme", nvme_path=nvme_folder()), gradients)
    file = _direct_file()
    try:
        step()  # writes the moments for the first time
        cases = {"ours": partial(_timed, step), "plain": partial(_timed, partial(_read_and_write, file))}
        seconds = in_turn(cases, rounds)
    finally:
        os.close(file)
    rates = {name: 2 * NVME_BYTES / median(times) / 1e9 for name, times in seconds.items()}
    return Result(
        bench="zero",
        case="nvme_step",
        ours=rates["ours"],
        peer=rates["plain"],
        unit="GB/s",
        lower_is_better=False,
        detail={
            "parameters": sum(NVME_SIZES),
            "gb_read_and_written": 2 * NVME_BYTES / 1e9,
            "at_least": 0.8,
            "peer": f"one thread, O_DIRECT, {REQUEST >> 20} MiB requests: all read, then all written",
            "spread": spread(seconds["ours"]),
            "peer_spread": spread(seconds["plain"]),
        },
    )


def _timed(step: Callable[[], None], pause: float = 0.0) -> float:
    time.sleep(pause)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _gradients(sizes: Sequence[int]) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(size) * 1e-3 for size in sizes]


def _engine_step(config: EngineConfig, gradients: Sequence[Tensor]) -> Callable[[], None]:
    """Return a complete step of the offloaded optimizer, from gradients that are already on the host."""
    module = nn.ParameterList(nn.Parameter(torch.zeros(len(g), dtype=torch.bfloat16)) for g in gradients)
    optimizer = OffloadedOptimizer(module, OPTIMIZER, config)
    optimizer.update_masters()
    tier = optimizer.tiers[0]

    def step() -> None:
        for shard, gradient in enumerate(gradients):
            tier.gradients.add(shard, gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torch_step() -> Callable[[], None]:
    masters = [nn.Parameter(torch.zeros(size)) for size in HOST_SIZES]
    halves = [torch.zeros(size, dtype=torch.bfloat16) for size in HOST_SIZES]
    for master, gradient in zip(masters, _gradients(HOST_SIZES), strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=OPTIMIZER.betas, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        for half, master in zip(halves, masters, strict=True):
            half.copy_(master)

    return step


@contextmanager
def _deepspeed_step() -> Iterator[Callable[[], float]]:
    """Yield a function that runs one step in DeepSpeed's process and returns its seconds. Raises BenchFailed."""
    command = [str(environment("deepspeed", DEEPSPEED)), "-m", "benchmarks.zero.deepspeed_adam"]
    process = subprocess.Popen(
        [*command, *map(str, HOST_SIZES)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert process.stdin is not None and process.stdout is not None
    output, requests = process.stdout, process.stdin
    try:
        while (line := output.readline()).strip() != "ready":
            if not line:
                raise BenchFailed(
                    f"DeepSpeed's CPU Adam did not start (status {process.wait()}); it needs a C++ compiler"
                )

        def step() -> float:
            time.sleep(PAUSE)
            requests.write("step\n")
            requests.flush()
            return float(output.readline())

        yield step
    finally:
        process.kill()


def _direct_file() -> int:
    """Return the descriptor of an unnamed file of `NVME_BYTES` bytes, opened for direct I/O and written once."""
    descriptor, path = tempfile.mkstemp(dir=nvme_folder())
    os.posix_fallocate(descriptor, 0, NVME_BYTES)
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    os.close(descriptor)
    os.unlink(path)
    _transfer(direct, os.pwritev)
    return direct


def _read_and_write(file: int) -> None:
    _transfer(file, os.preadv)
    _transfer(file, os.pwritev)


def _transfer(file: int, operation: Callable[[int, list[memoryview], int], int]) -> None:
    view = memoryview(mmap.mmap(-1, REQUEST))  # direct I/O needs memory that starts at a page
    for offset in range(0, NVME_BYTES, REQUEST):
        assert operation(file, [view], offset) == REQUEST
