"""What the hosts of the Triton kernels ask of a device."""

from functools import cache

import torch


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, one each. 4 on a CPU, where Triton's interpreter runs them in turn."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 4


@cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot treats fp32: as torch.set_float32_matmul_precision says, so that kernels follow the same switch."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
