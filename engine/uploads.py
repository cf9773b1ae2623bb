"""What the host lays out, on its way to where it is computed with."""

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`. A GPU fetches it from pinned memory in its own time, so that the host need not wait."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Whole numbers on the device, likewise."""
    return uploaded(torch.tensor(values, dtype=dtype), device)
