"""What a figure was measured on: the machine without any name of it, and how fast and quiet it was just then."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

SIZE = 2048
FEWEST_SECONDS = 0.5


def describe() -> dict[str, Any]:
    """Cores this process may use, memory, models of processor and GPU, versions. No host, user or address."""
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def quiet_figures() -> dict[str, float]:
    """A fixed matrix product in fp32 and bf16, GFLOP/s, and the CPU seconds it got per wall second.

    With nothing else running the last is close to the number of threads; well below, others were using the machine
    and the figures beside it are worth little.
    """
    cpu, wall = time.process_time(), time.monotonic()
    fp32, bf16 = matrix_gflops(torch.float32), matrix_gflops(torch.bfloat16)
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    return {
        "matmul_fp32_gflops": fp32,
        "matmul_bf16_gflops": bf16,
        "cpu_seconds_per_second": share,
        "threads": torch.get_num_threads(),
    }


def matrix_gflops(dtype: torch.dtype, seconds: float = FEWEST_SECONDS) -> float:
    """Rate of a product of two `SIZE` by `SIZE` matrices on the CPU, the best of repeats over about `seconds`."""
    left, right = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    torch.mm(left, right)
    best, until = float("inf"), time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        torch.mm(left, right)
        best = min(best, time.monotonic() - began)
    return 2 * SIZE**3 / best / 1e9


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
