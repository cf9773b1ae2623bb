"""Sampling: one token per row from logits, with its log-probability.

A token is the inverse of the cumulative distribution at one uniform number per row. With top-k or top-p the
distribution is in descending order of probability (ties in the order of the vocabulary), otherwise in the order of the
vocabulary. Filters apply in the order temperature, top-k, top-p (Holtzman et al., 2020, arXiv:1904.09751), min-p
(Nguyen et al., 2024, arXiv:2407.01082); probabilities are normalised again after top-k.

`sample` selects the implementation: Triton on GPUs, C on CPUs, otherwise `reference`. The implementations sum in
different orders. A token may therefore differ if its uniform number is within about 1e-6 of the border of two tokens.

Shapes: B rows, V vocabulary.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine.kernels_cpu.library import library
from engine.kernels_triton.device import has_triton

BLOCK, BLOCKS = 256, 16  # the size of a block of weights (also in sample.c); fewer blocks are summed at once
LIKELY = BLOCKS * BLOCK  # tokens in which top-p is sought first
C_DTYPES = (torch.bfloat16, torch.float32)
LOGITS_PER_THREAD = 2**15  # fewer logits are not worth a thread


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
    return sample_in_c if c_supports(logits) else reference


def reference(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Compute `sample` with torch operators. `torch.topk` decides which of several equal logits pass top-k."""
    if temperature > 0 and top_k == 0 and top_p == 1:
        return _invert(_without_unlikely(_weights(logits, temperature), min_p), uniforms)
    logits = logits.float()
    if temperature == 0:
        tokens = logits.argmax(-1)
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        return tokens, chosen - logits.logsumexp(-1)
    if temperature != 1:
        logits = logits / temperature
    tokens, probabilities = _ranked(logits, top_k, top_p)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # mass of all more probable tokens
        probabilities = probabilities.masked_fill(before >= top_p, 0)
    probabilities = _without_unlikely(probabilities, min_p)
    columns, logprobs = _invert(probabilities, uniforms)
    return tokens.gather(-1, columns[:, None])[:, 0], logprobs


def _without_unlikely(probabilities: Tensor, min_p: float) -> Tensor:
    if min_p == 0:
        return probabilities
    return probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)


def _ranked(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that may pass top-k and top-p, most probable first, and their probabilities: both (B, K).

    top-p is that of the distribution after top-k. A sort of the vocabulary takes many times as long as a search for the
    LIKELY largest logits, which are enough unless the distribution is flat.
    """
    size = logits.shape[-1]
    if 0 < top_k < size:
        ranked, tokens = torch.topk(logits, top_k, dim=-1)
        return tokens, ranked.softmax(-1)
    total = logits.logsumexp(-1, keepdim=True)
    if size > 2 * LIKELY:
        tokens = torch.topk(logits, LIKELY, dim=-1, sorted=False).indices.sort(-1).values
        ranked, order = torch.sort(logits.gather(-1, tokens), dim=-1, descending=True, stable=True)
        probabilities = (ranked - total).exp_()
        above_last = probabilities.masked_fill(ranked == ranked[:, -1:], 0).sum(-1)  # other tokens may equal the last
        if bool((above_last >= top_p).all()):
            return tokens.gather(-1, order), probabilities
    ranked, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return tokens, (ranked - total).exp_()


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Return exp(logits / temperature), scaled to [0, 1], of logits (B, V): fp32, (B, V), or padded to full blocks.

    `_invert` needs full blocks. All operations are in place on one copy of the logits.
    """
    rows, size = logits.shape
    if size < BLOCKS * BLOCK:
        weights = logits.to(torch.float32, copy=True)
    else:
        weights = logits.new_empty(rows, -(-size // BLOCK) * BLOCK, dtype=torch.float32)
        weights[:, :size] = logits
        weights[:, size:] = float("-inf")
    weights -= weights.amax(-1, keepdim=True)
    if temperature != 1:
        weights /= temperature
    return weights.exp_()


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative sum of weights (B, V) at uniforms (B,): columns (B,), log-probabilities (B,).

    The column is the first whose cumulative sum exceeds u times the total, so its weight is positive. If rounding makes
    this fail in the last bit, the column of the largest weight is returned. With many weights, blocks are summed first,
    and only one block is searched: the cumulative sum of all weights takes five times as long as their sum.
    """
    rows, size = weights.shape
    uniforms = uniforms[:, None].to(weights.dtype)
    if size % BLOCK or size < BLOCKS * BLOCK:
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:]
        columns = _first_above(cumulative, uniforms * total)
    else:
        blocks = weights.view(rows, -1, BLOCK)
        sums = blocks.sum(-1)
        cumulative = sums.cumsum(-1)
        total = cumulative[:, -1:]
        block = _first_above(cumulative, uniforms * total)
        remaining = uniforms * total - (cumulative.gather(-1, block) - sums.gather(-1, block))
        within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
        columns = block * BLOCK + _first_above(within.cumsum(-1), remaining.clamp_(min=0))
    chosen = weights.gather(-1, columns)
    if chosen.device.type != "cpu" or not bool((chosen > 0).all()):  # the test would make the host wait for a GPU
        columns = torch.where(chosen > 0, columns, weights.argmax(-1, keepdim=True))
        chosen = weights.gather(-1, columns)
    return columns[:, 0], (chosen / total).log()[:, 0]


def _first_above(cumulative: Tensor, share: Tensor) -> Tensor:
    """Return the first column (B, 1) of ascending rows (B, V) that exceeds the row's share (B, 1), else the last."""
    return torch.searchsorted(cumulative, share, right=True).clamp_(max=cumulative.shape[-1] - 1)


def c_supports(logits: Tensor) -> bool:
    """Return whether the kernel can read these logits here."""
    return logits.device.type == "cpu" and logits.dtype in C_DTYPES and _c_function() is not None


def sample_in_c(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Compute `sample` in C, for logits that `c_supports`. Top-k keeps equal logits in the order of the vocabulary."""
    function = _c_function()
    assert function is not None and c_supports(logits)
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    uniforms = uniforms.to("cpu", torch.float32).contiguous()
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    threads = max(1, min(torch.get_num_threads(), logits.numel() // LOGITS_PER_THREAD, rows))
    room = torch.empty(threads, 3, -(-vocabulary // BLOCK) * BLOCK)
    function(
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        rows,
        vocabulary,
        logits.stride(0),
        uniforms.data_ptr(),
        temperature,
        top_k,
        top_p,
        min_p,
        tokens.data_ptr(),
        logprobs.data_ptr(),
        room.data_ptr(),
        threads,
    )
    return tokens, logprobs


@cache
def _c_function() -> Callable[..., None] | None:
    compiled = library("sample")
    if compiled is None:
        return None
    pointer, flag, size, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    compiled.sample.argtypes = [
        *(pointer, flag, size, size, size, pointer),
        *(number, size, number, number),
        *(pointer, pointer, pointer, flag),
    ]
    compiled.sample.restype = None
    function: Callable[..., None] = compiled.sample
    return function
