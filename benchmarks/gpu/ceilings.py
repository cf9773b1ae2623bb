"""Measured limits of the GPU: bytes per second of a large copy, operations per second of a matrix product."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.setting import Setting


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield one row per limit."""
    yield {"case": "copy", "gb_per_second": copy_rate(setting) / 1e9}
    yield {"case": "matmul", "tflops": matmul_rate(setting) / 1e12}


def copy_rate(setting: Setting) -> float:
    """Return the bytes read and written per second by a copy that is much larger than every cache."""
    source = torch.empty(setting.of(2**32, 2**20), dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / setting.seconds(lambda: target.copy_(source), 7)


def matmul_rate(setting: Setting) -> float:
    """Return the operations per second of a bf16 product of random matrices (zeros run faster)."""
    n = setting.of(8192, 64)
    a, b = (torch.randn(n, n, device=setting.device).to(setting.dtype) for _ in range(2))
    repeats = setting.of(10, 1)
    return 2 * n**3 * repeats / setting.seconds(lambda: [a @ b for _ in range(repeats)], 5)
