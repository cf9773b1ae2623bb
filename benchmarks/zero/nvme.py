"""The folder for files of the NVMe tier, from BENCH_NVME."""

import os
import tempfile


def nvme_folder() -> str:
    """Return BENCH_NVME, or the temporary folder. A useful figure needs a disk that supports direct I/O."""
    return os.environ.get("BENCH_NVME", tempfile.gettempdir())
