"""Numbers on their way from the host to where they are computed with."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Whole numbers on the device, without waiting for it."""
    numbers = torch.tensor(values, dtype=dtype)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
