"""What this machine has: measured, not looked up."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class Machine:
    """Bytes of one device (None without a GPU), how many devices, bytes of host memory, and free on a disk."""

    device: int | None
    devices: int
    host: int
    disk: int


def this_machine(folder: str | None = None) -> Machine:
    """Measured capacities: the smallest device, the host's memory, what is free where `folder` is (NVMe tiers).

    Raises FileNotFoundError where there is no such folder.
    """
    if folder is not None and not Path(folder).exists():
        raise FileNotFoundError(f"nvme_path={folder}: there is no such folder; make it, or name another")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.mem_get_info(index)[1] for index in range(count)]
    free = shutil.disk_usage(folder or tempfile.gettempdir()).free
    return Machine(min(sizes) if sizes else None, count, psutil.virtual_memory().total, free)
