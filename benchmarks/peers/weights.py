"""The same weights on both sides, in whatever order a library makes its own: a parameter's name decides its numbers."""

import zlib

import numpy as np
import torch
from torch import nn

SPREAD = 0.02  # standard deviation, as new models have


def fill(model: nn.Module) -> None:
    """Draw each matrix anew; norms and biases stay as they are made, ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                source = np.random.default_rng(zlib.crc32(name.encode()))
                drawn = source.standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(drawn).mul_(SPREAD))
