"""The same random weights on both sides: the name of a parameter determines its values."""

import zlib

import numpy as np
import torch
from torch import nn

STD = 0.02  # the default of transformers


def fill(model: nn.Module) -> None:
    """Sample each matrix. Norms and biases retain their initial ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                source = np.random.default_rng(zlib.crc32(name.encode()))
                values = source.standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(values).mul_(STD))
