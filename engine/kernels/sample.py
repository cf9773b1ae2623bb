"""One token a row from logits, with its log-probability: temperature, min-p, top-k, top-p and the draw in one call.

The random number is that of `engine.rollout.sampling.uniforms`, and tokens are drawn as `engine.rollout.sampling.sample`
draws them: by inverting the cumulative distribution, in the order of the vocabulary, or of the likelihood (ties by
index) where something is filtered. Min-p (Nguyen et al., 2024, arXiv:2407.01082) comes first: tokens less likely than
`min_p` times the likeliest are gone before top-k and top-p look.

This is the torch implementation, for every device, and the reference for the faster one beside it.
"""

from dataclasses import replace
from math import log

import torch
from torch import Tensor

from engine.rollout import sampling
from engine.rollout.sampling import Sampling


def sample(
    logits: Tensor, streams: Tensor, positions: Tensor, how: Sampling, *, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Logits (B, V), streams (B,) and positions (B,) int64 -> tokens (B,) int64, log-probabilities (B,) fp32.

    Of `how` temperature, top_k, top_p and seed are read. The log-probability is that under the distribution the token
    was drawn from; a greedy token's (temperature 0) that of the plain distribution. Raises ValueError where shapes or
    min_p don't fit.
    """
    check(logits, streams, positions, min_p)
    uniforms = sampling.uniforms(how.seed, streams, positions)
    if min_p > 0 and how.temperature > 0:
        scaled = logits.float() / how.temperature
        logits = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + log(min_p), float("-inf"))
        # Filtered, so in the order of likelihood, whether or not there is more to filter.
        how = replace(how, temperature=1.0, top_k=how.top_k or logits.shape[-1])
    return sampling.sample(logits, how, uniforms)


def check(logits: Tensor, streams: Tensor, positions: Tensor, min_p: float) -> None:
    """Raise ValueError where the shapes or `min_p` don't fit."""
    rows = logits.shape[:1]
    if logits.ndim != 2 or streams.shape != rows or positions.shape != rows:
        raise ValueError(
            f"logits (B, V), streams (B,), positions (B,) do not fit: {tuple(logits.shape)}, {tuple(streams.shape)}, "
            f"{tuple(positions.shape)}"
        )
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be between 0 (off) and 1, not {min_p}")
    if streams.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(f"streams and positions must be int64, not {streams.dtype} and {positions.dtype}")
