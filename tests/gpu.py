"""The marker and the process group of tests that need a GPU. `pytest -m gpu` runs these tests.

They are skipped on machines without a GPU. GPU_TESTS_ON=cpu runs the test code on the CPU without CUDA graphs and with
PyTorch's kernels, which checks the tests themselves. tests/simulated_gpu runs the tests on a simulated device.
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
def single_rank() -> Iterator[dist.World]:
    """Start a process group of one rank on the device, and stop it after the test."""
    yield dist.start("gpu-tests", device=DEVICE.type)
    dist.stop()
