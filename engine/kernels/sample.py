"""One token a row from logits, with its log-probability: temperature, top-k, top-p, min-p and the draw in one call.

The random number is that of `uniforms` in generation/sampling.py, and tokens are drawn as its `sample` draws them:
by inverting the cumulative distribution, in the order of the likelihood (ties by index) where top-k or top-p filter,
else in the order of the vocabulary.

This is the torch implementation, for every device, and the reference for the faster one beside it.
"""

import torch
from torch import Tensor

from engine.generation import sampling
from engine.generation.sampling import Sampling


def sample(logits: Tensor, streams: Tensor, positions: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """Logits (B, V), streams (B,) and positions (B,) int64 -> tokens (B,) int64, log-probabilities (B,) fp32.

    Of `how` temperature, top_k, top_p, min_p and seed are read. The log-probability is that under the distribution the
    token was drawn from; a greedy token's (temperature 0) that of the plain distribution. Raises ValueError where the
    shapes don't fit.
    """
    check(logits, streams, positions)
    return draw(logits, how, sampling.uniforms(how.seed, streams, positions))


def draw(logits: Tensor, how: Sampling, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` by given random numbers (B,) in [0, 1)."""
    return sampling.sample(logits, how, numbers)


def check(logits: Tensor, streams: Tensor, positions: Tensor) -> None:
    """Raise ValueError where shapes or types don't fit."""
    rows = logits.shape[:1]
    if logits.ndim != 2 or streams.shape != rows or positions.shape != rows:
        raise ValueError(
            f"logits (B, V), streams (B,), positions (B,) do not fit: {tuple(logits.shape)}, {tuple(streams.shape)}, "
            f"{tuple(positions.shape)}"
        )
    if streams.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(f"streams and positions must be int64, not {streams.dtype} and {positions.dtype}")
