"""One bit a number: the sign, and one scale for a tensor (1-bit Adam, Tang et al., 2021, arXiv:2102.02888, section 4).

    C[x] = |x|_2 / sqrt(n) sign(x),        sign(0) = 1

Bits lie in bytes, the first number in the lowest bit; counts of numbers are multiples of 8.
"""

import torch
from torch import Tensor


def scale_of(values: Tensor, numbers: int) -> Tensor:
    """|x|_2 / sqrt(numbers): () fp32. `values` may be padded with zeros; 0 where there are no numbers."""
    return torch.linalg.vector_norm(values) / max(numbers, 1) ** 0.5


def pack(values: Tensor) -> Tensor:
    """(..., 8 k) signs as (..., k) bytes."""
    bits = (values >= 0).view(torch.uint8).unflatten(-1, (-1, 8))
    return (bits << _places(values.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """(..., k) bytes as (..., 8 k) fp32: 1 and -1."""
    every = torch.arange(256, dtype=torch.uint8, device=packed.device)[:, None]
    table = ((every >> _places(packed.device)) & 1).float().mul_(2.0).sub_(1.0)  # (256, 8)
    return torch.nn.functional.embedding(packed.int(), table).flatten(-2)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
