"""Numbers that a device computed, read on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.parallel import dist


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Each as a number. The host waits for the device once for all of them, not once each."""
    tensors = [value.detach().to(dist.world().device, torch.float64) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]
