"""Tests that need a GPU: `pytest -m gpu` runs them, and they are skipped where there is none.

GPU_TESTS_ON=cpu runs their code on the CPU instead (nothing is captured, kernels are torch's): it shows that the tests
work, not that the GPU does. tests/pretended_gpu runs them on a device that is pretended.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from engine.parallel import dist

DEVICE = torch.device(os.environ.get("GPU_TESTS_ON", "cuda"))
ON_GPU = DEVICE.type == "cuda"

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def lone_rank() -> Iterator[dist.World]:
    """A process group of one rank on the device, left again."""
    yield dist.start("gpu-tests", device=DEVICE.type)
    dist.stop()
