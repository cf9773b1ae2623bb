"""What is made ready once, for one shape, and called often: kernels between the products of a decode step."""

from collections.abc import Callable

import torch
from torch import Tensor

Ready = tuple[Callable[..., None], list[Tensor]]  # what runs, and what it writes
DTYPES = (torch.float32, torch.bfloat16)
