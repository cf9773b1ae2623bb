"""Where the benches put what is to be on a disk: BENCH_NVME, else the temporary folder."""

import os
import tempfile


def folder() -> str:
    """A folder on a disk that takes direct I/O; a figure of another one would say nothing."""
    return os.environ.get("BENCH_NVME", tempfile.gettempdir())
