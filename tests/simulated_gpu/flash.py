"""The operators of `torch.nn.attention.varlen.varlen_attn`, computed by the definition of attention in fp32.

They are registered for CPU tensors, for which PyTorch has no implementation. The simulated device calls the CPU
implementation of every operator. The checks are those of the CUDA kernels (FlashAttention 2 in PyTorch), and two more:
invalid cu_seqlens and too small maximal lengths, which the CUDA kernels accept silently.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_HEAD = 256


@dataclass(frozen=True)
class _Sequence:
    """The position of one sequence in the packed rows: queries `q0` to `q1`, keys `k0` to `k1`."""

    q0: int
    q1: int
    k0: int
    k1: int

    def mask(self, left: int, right: int) -> Tensor:
        """Return (queries, keys), True where a query attends to a key. The last query is aligned with the last key."""
        positions = torch.arange(self.q1 - self.q0)[:, None] + (self.k1 - self.k0) - (self.q1 - self.q0)
        keys = torch.arange(self.k1 - self.k0)
        inside = torch.ones(len(positions), len(keys), dtype=torch.bool)
        if left >= 0:
            inside &= keys >= positions - left
        if right >= 0:
            inside &= keys <= positions + right
        return inside


def _sequences(query: Tensor, key: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int]) -> list[_Sequence]:
    for cu_seqlens, row, most in zip(starts, (query, key), longest, strict=True):
        assert cu_seqlens.dtype == torch.int32, "cu_seqlens must have dtype int32"
        assert cu_seqlens.is_contiguous(), "cu_seqlens must be contiguous"
        lengths = cu_seqlens.diff()
        covers_row = cu_seqlens[0] == 0 and cu_seqlens[-1] == len(row)
        assert covers_row and bool((lengths >= 0).all()), "cu_seqlens must rise from 0 to the row's length (simulated)"
        assert int(lengths.max()) <= most, f"a sequence is longer than max_seqlen {most} (simulated)"
    q, k = (cu_seqlens.tolist() for cu_seqlens in starts)
    return [_Sequence(*each) for each in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)]


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    assert query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert key.dtype == value.dtype == query.dtype, "query, key and value must have the same dtype"
    assert all(t.stride(-1) == 1 for t in (query, key, value)), "Input tensor must have contiguous last dimension"
    assert query.shape[2] <= LARGEST_HEAD, "FlashAttention forward only supports head dimension at most 256"
    assert query.shape[2] % 8 == 0, "head_size must be a multiple of 8"
    assert query.shape[1] % key.shape[1] == 0, "Number of heads in key/value must divide number of heads in query"
    assert key.shape == value.shape and key.shape[2] == query.shape[2], "shapes differ"


def _wide(query: Tensor, key: Tensor, value: Tensor, at: _Sequence) -> Iterator[Tensor]:
    """Yield query, key and value of one sequence in fp32: (heads, tokens, size). Shared heads are repeated."""
    groups = query.shape[1] // key.shape[1]
    yield query[at.q0 : at.q1].float().transpose(0, 1)
    for t in (key, value):
        yield t[at.k0 : at.k1].float().transpose(0, 1).repeat_interleave(groups, dim=0)


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output (N, heads, size), the log-sum-exp (heads, N), and three tensors without meaning.

    query: (N, heads, size); key and value: (K, key heads, size).
    """
    unsupported = [name for name, value in others.items() if value is not None]
    assert dropout_p == 0.0 and not unsupported, f"not supported (simulated): dropout, {unsupported}"
    _check(query, key, value)
    left, right = _window(is_causal, window_size_left, window_size_right)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for at in _sequences(query, key, (starts_q, starts_k), (max_q, max_k)):
        q, k, v = _wide(query, key, value, at)
        scores = (q @ k.mT * scale).masked_fill(~at.mask(left, right), float("-inf"))
        out[at.q0 : at.q1] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        sums[:, at.q0 : at.q1] = scores.logsumexp(-1)
    unread = torch.zeros((), dtype=torch.uint64)
    return out, sums, torch.zeros(2, dtype=torch.uint64), unread, torch.empty(0, dtype=query.dtype)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts_q: Tensor,
    starts_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value."""
    assert dropout_p == 0.0 and grad_out.dtype == query.dtype == out.dtype, "query and dout must have the same dtype"
    _check(query, key, value)
    left, right = _window(is_causal, window_size_left, window_size_right)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    for at in _sequences(query, key, (starts_q, starts_k), (max_q, max_k)):
        q, k, v = _wide(query, key, value, at)
        upstream, output = (t[at.q0 : at.q1].float().transpose(0, 1) for t in (grad_out, out))
        scores = (q @ k.mT * scale).masked_fill(~at.mask(left, right), float("-inf"))
        shares = (scores - sums[:, at.q0 : at.q1, None]).exp()
        through = shares * (upstream @ v.mT - (upstream * output).sum(-1, keepdim=True)) * scale
        grads[0][at.q0 : at.q1] = (through @ k).transpose(0, 1).to(query.dtype)
        for grad, wide in zip(grads[1:], (through.mT @ q, shares.mT @ upstream), strict=True):
            summed = wide.unflatten(0, (key.shape[1], -1)).sum(1)
            grad[at.k0 : at.k1] = summed.transpose(0, 1).to(key.dtype)
    return grads[0], grads[1], grads[2]


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """Return how many keys before and after its position a query attends to. Negative numbers mean all."""
    return -1 if left is None else left, 0 if is_causal else -1 if right is None else right


def register() -> None:
    """Register the operators for the life of the process."""
    torch.library.impl("aten::_flash_attention_forward", "CPU", forward)
    torch.library.impl("aten::_flash_attention_backward", "CPU", backward)
