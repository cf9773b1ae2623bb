"""What the hosts of the Triton kernels ask of a device."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Card:
    """What tiles are chosen by: the compute capability (86 is 8.6), and bytes of shared memory a program may have."""

    capability: int
    shared: int


H200 = Card(90, 227 * 1024)


def card(device: torch.device) -> Card:
    """The device's; an H200's on a CPU, for Triton's interpreter."""
    return _card(device.index or 0) if device.type == "cuda" else H200


@cache
def _card(index: int) -> Card:
    about: Any = torch.cuda.get_device_properties(index)  # PyTorch's own stub leaves some of it out
    return Card(about.major * 10 + about.minor, about.shared_memory_per_block_optin)


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
