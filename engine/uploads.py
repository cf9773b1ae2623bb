"""Copies of small tensors from the host to the device, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on `device`. A GPU copies it from pinned memory while the host continues."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return integers as a tensor on the device, with the same copy."""
    return to_device(torch.tensor(values, dtype=dtype), device)
