"""Tensors that were laid out on the host, on their way to where they are computed with."""

import torch
from torch import Tensor


def uploaded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`. A GPU fetches it from pinned memory in its own time, so that the host need not wait."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
