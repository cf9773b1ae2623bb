"""The machine of a measurement: its description without names, and its speed and load before the measurement."""

import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

SIZE = 2048
SMALL_SIZE = 512  # without bf16 instructions, one bf16 product of SIZE takes a minute
MIN_SECONDS = 0.5


def describe() -> dict[str, Any]:
    """Return cores, memory, models of processor and GPUs, and versions. Omit names of host and user, and addresses."""
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
    """Return the speed of a fixed matrix product in fp32 and bf16 (GFLOP/s), and the CPU seconds per second in fp32.

    The CPU seconds per second are close to the number of threads if no other program runs. A much smaller value means
    that the figures of the run are unreliable.
    """
    cpu_start, wall_start = time.process_time(), time.monotonic()
    fp32 = matrix_gflops(torch.float32)
    share = (time.process_time() - cpu_start) / (time.monotonic() - wall_start)
    bf16 = matrix_gflops(torch.bfloat16, size=SIZE if cpu_precision() == "bf16" else SMALL_SIZE)
    return {
        "matmul_fp32_gflops": fp32,
        "matmul_bf16_gflops": bf16,
        "cpu_seconds_per_second": share,
        "threads": torch.get_num_threads(),
    }


@cache
def cpu_precision() -> str:
    """Return the precision of benchmarks on the CPU: "bf16" if its products reach half the rate of fp32, else "fp32".

    Processors without bf16 instructions multiply bf16 matrices hundreds of times more slowly than fp32.
    """
    fp32, bf16 = (matrix_gflops(dtype, 0.1, SMALL_SIZE) for dtype in (torch.float32, torch.bfloat16))
    return "bf16" if bf16 >= fp32 / 2 else "fp32"


def cpu_precisions() -> tuple[str, ...]:
    """Return the precisions in which a comparison runs on the CPU: bf16 too, unless `cpu_precision` excludes it."""
    return tuple(dict.fromkeys((cpu_precision(), "fp32")))


def matrix_gflops(dtype: torch.dtype, seconds: float = MIN_SECONDS, size: int = SIZE) -> float:
    """Return the rate of a product of two `size` by `size` matrices on the CPU: the best of about `seconds`."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    torch.mm(left, right)
    best, end = float("inf"), time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        torch.mm(left, right)
        best = min(best, time.monotonic() - start)
    return 2 * size**3 / best / 1e9


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
