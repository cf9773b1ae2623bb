"""For pytest: the pretended device in the place of torch's CUDA, and a test that leaves a fault fails."""

from tests.pretended_gpu import cuda  # before torch  # isort: skip

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_faults() -> Iterator[None]:
    """Streams, pinned memory and freed memory are used as a GPU allows."""
    cuda.faults()
    yield
    found = cuda.faults()
    assert not found, "\n".join(found)
