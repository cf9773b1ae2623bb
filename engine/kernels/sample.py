"""Sampling: one token per row from logits, with its log-probability.

A token is the inverse of the cumulative distribution, in the order of the vocabulary, at one uniform number per row.
Filters apply in the order temperature, top-k, top-p (Holtzman et al., 2020, arXiv:1904.09751), min-p (Nguyen et al.,
2024, arXiv:2407.01082); probabilities are normalised again after top-k.

`sample` selects the implementation: Triton on GPUs, otherwise `reference`. The implementations sum in different orders.
A token may therefore differ if its uniform number is within about 1e-6 of the border of two tokens.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels_triton.device import has_triton

LIKELY = 64  # tokens in which top-p is sought first


def sample(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return one token per row, (B,) int64, and its log-probability, (B,) fp32.

    logits: (B, V) fp32, bf16 or fp16. uniforms: (B,) fp32 in [0, 1). temperature 0 selects the most probable token.
    top_k 0, top_p 1 and min_p 0 filter nothing; min_p removes tokens with less than this share of the highest
    probability. The log-probability is that of the filtered distribution with temperature, normalised; for temperature
    0 that of the plain distribution. A token of probability zero is never sampled. A row with NaN has log-probability
    NaN. Raises ValueError if the shapes do not fit.
    """
    if logits.ndim != 2 or not logits.shape[1] or uniforms.shape != logits.shape[:1]:
        raise ValueError(f"logits must be (B, V) and uniforms (B,), not {tuple(logits.shape)}, {tuple(uniforms.shape)}")
    implementation = _implementation(logits)
    return implementation(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _implementation(logits: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    if logits.is_cuda and has_triton():
        from engine.kernels_triton import sample as in_triton

        return in_triton.sample
    return reference


def reference(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Compute `sample` with torch operators. `torch.topk` decides which of several equal logits pass top-k."""
    if temperature == 0:
        logits = logits.float()
        highest, tokens = logits.max(-1)
        return tokens, highest - logits.logsumexp(-1)
    if not 0 < top_k < logits.shape[-1]:
        return _sample(_weights(logits, temperature), uniforms, top_p, min_p, LIKELY)
    tokens = logits.topk(top_k, sorted=False).indices.sort(-1).values
    weights = _weights(logits.gather(-1, tokens), temperature)
    columns, logprobs = _sample(weights, uniforms, top_p, min_p, top_k)
    return tokens.gather(-1, columns[:, None])[:, 0], logprobs


def _sample(weights: Tensor, uniforms: Tensor, top_p: float, min_p: float, count: int) -> tuple[Tensor, Tensor]:
    """Sample one column (B,) of weights (B, V), and its log-probability (B,).

    Top-p searches the `count` likeliest columns, which is several times as fast as a sort. A row whose top-p needs more
    columns is sampled again with more of them.
    """
    if top_p == 1:
        return _invert(_without_unlikely(weights, min_p), uniforms)
    total, likely, tokens = top_p * weights.sum(-1, keepdim=True), weights, None
    if count < weights.shape[-1]:
        tokens = weights.topk(count, sorted=False).indices.sort(-1).values
        likely = weights.gather(-1, tokens)
    ranked, order = torch.sort(likely, dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked  # weight of all more probable columns
    allowed = torch.zeros_like(likely).scatter_(-1, order, ranked.masked_fill(before >= total, 0))
    columns, logprobs = _invert(_without_unlikely(allowed, min_p), uniforms)
    if tokens is None:
        return columns, logprobs
    columns = tokens.gather(-1, columns[:, None])[:, 0]
    above_last = ranked.masked_fill(ranked == ranked[:, -1:], 0).sum(-1)  # other columns may equal the last
    rows = (~(above_last >= total[:, 0])).nonzero()[:, 0]
    if len(rows):
        columns[rows], logprobs[rows] = _sample(weights[rows], uniforms[rows], top_p, min_p, 16 * count)
    return columns, logprobs


def _without_unlikely(probabilities: Tensor, min_p: float) -> Tensor:
    if min_p == 0:
        return probabilities
    return probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Return exp(logits / temperature), scaled to [0, 1], of logits (B, V): fp32, (B, V)."""
    weights = logits.to(torch.float32, copy=True)
    weights -= weights.amax(-1, keepdim=True)
    if temperature != 1:
        weights /= temperature
    return weights.exp_()


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative sum of weights (B, V) at uniforms (B,): columns (B,), log-probabilities (B,).

    The column is the first whose cumulative sum exceeds u times the total, so its weight is positive. If rounding makes
    this fail in the last bit, the column of the largest weight is returned.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    columns = torch.searchsorted(cumulative, uniforms[:, None].to(weights.dtype) * total, right=True)
    columns = columns.clamp_(max=weights.shape[-1] - 1)
    chosen = weights.gather(-1, columns)
    if chosen.device.type != "cpu" or not bool((chosen > 0).all()):  # the test would make the host wait for a GPU
        columns = torch.where(chosen > 0, columns, weights.argmax(-1, keepdim=True))
        chosen = weights.gather(-1, columns)
    return columns[:, 0], (chosen / total).log()[:, 0]
