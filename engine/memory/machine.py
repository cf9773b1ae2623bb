"""What this machine has: measured, not looked up."""

from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class Machine:
    """Bytes of one device (None without a GPU), how many devices, and bytes of host memory."""

    device: int | None
    devices: int
    host: int


def this_machine() -> Machine:
    """Measured capacities: the smallest device, and the host's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.mem_get_info(index)[1] for index in range(count)]
    return Machine(min(sizes) if sizes else None, count, psutil.virtual_memory().total)
