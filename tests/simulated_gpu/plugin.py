"""A pytest plugin that replaces torch's CUDA by the simulated device and fails tests that cause faults."""

from tests.simulated_gpu import cuda  # before torch  # isort: skip

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_faults() -> Iterator[None]:
    """Fail the test if it used streams, pinned memory or freed memory in a way that is wrong on a GPU."""
    cuda.faults()
    yield
    actual = cuda.faults()
    assert not actual, "\n".join(actual)
