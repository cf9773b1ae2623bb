"""The operators under `torch.nn.attention.varlen.varlen_attn`, by definition: attention within the sequences of a row.

Registered for CPU tensors, where PyTorch has none; the pretended device calls them there as it calls every operator.
They refuse what the CUDA kernels refuse (csrc of FlashAttention 2, as PyTorch has it), and two things that those read
past without a word: starts that are no starts, and longest lengths that are too short.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_HEAD = 256


@dataclass(frozen=True)
class _Sequence:
    """One sequence's tokens of a row: queries `q0` to `q1`, keys `k0` to `k1`."""

    q0: int
    q1: int
    k0: int
    k1: int

    def seen(self, left: int, right: int) -> Tensor:
        """(queries, keys) True where a query looks; windows count from the last key back."""
        own = torch.arange(self.q1 - self.q0)[:, None] + (self.k1 - self.k0) - (self.q1 - self.q0)
        keys = torch.arange(self.k1 - self.k0)
        inside = torch.ones(len(own), len(keys), dtype=torch.bool)
        if left >= 0:
            inside &= keys >= own - left
        if right >= 0:
            inside &= keys <= own + right
        return inside


def _sequences(query: Tensor, key: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int]) -> list[_Sequence]:
    for given, row, most in zip(starts, (query, key), longest, strict=True):
        assert given.dtype == torch.int32, "cu_seqlens must have dtype int32"
        assert given.is_contiguous(), "cu_seqlens must be contiguous"
        lengths = given.diff()
        assert given[0] == 0 and given[-1] == len(row) and bool((lengths >= 0).all()), "these are no starts (pretended)"
        assert int(lengths.max()) <= most, f"a sequence is longer than {most}, its end would stay undone (pretended)"
    q, k = (given.tolist() for given in starts)
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
    """(heads, tokens, size) fp32 of one sequence, keys and values repeated for the heads that share them."""
    groups = query.shape[1] // key.shape[1]
    yield query[at.q0 : at.q1].float().transpose(0, 1)
    for t in (key, value):
        yield t[at.k0 : at.k1].float().transpose(0, 1).repeat_interleave(groups, dim=0)


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **others: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """query (N, heads, size), key and value (K, key heads, size) -> output, log of the sums of exponentials (heads, N),
    and three that nobody reads.
    """
    assert dropout_p == 0.0 and not any(given is not None for given in others.values()), "not done (pretended)"
    _check(query, key, value)
    left, right = _window(is_causal, window_size_left, window_size_right)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out, sums = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for at in _sequences(query, key, (starts_q, starts_k), (max_q, max_k)):
        q, k, v = _wide(query, key, value, at)
        scores = (q @ k.mT * scale).masked_fill(~at.seen(left, right), float("-inf"))
        out[at.q0 : at.q1] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        sums[:, at.q0 : at.q1] = scores.logsumexp(-1)
    unread = torch.zeros((), dtype=torch.uint64)
    return out, sums, torch.zeros(2, dtype=torch.uint64), unread, torch.empty(0, dtype=query.dtype)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts_q: Tensor,
    starts_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    assert dropout_p == 0.0 and grad_out.dtype == query.dtype == out.dtype, "query and dout must have the same dtype"
    _check(query, key, value)
    left, right = _window(is_causal, window_size_left, window_size_right)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    for at in _sequences(query, key, (starts_q, starts_k), (max_q, max_k)):
        q, k, v = _wide(query, key, value, at)
        upstream, made = (t[at.q0 : at.q1].float().transpose(0, 1) for t in (grad_out, out))
        scores = (q @ k.mT * scale).masked_fill(~at.seen(left, right), float("-inf"))
        shares = (scores - sums[:, at.q0 : at.q1, None]).exp()
        through = shares * (upstream @ v.mT - (upstream * made).sum(-1, keepdim=True)) * scale
        grads[0][at.q0 : at.q1] = (through @ k).transpose(0, 1).to(query.dtype)
        for grad, wide in zip(grads[1:], (through.mT @ q, shares.mT @ upstream), strict=True):
            summed = wide.unflatten(0, (key.shape[1], -1)).sum(1)
            grad[at.k0 : at.k1] = summed.transpose(0, 1).to(key.dtype)
    return grads[0], grads[1], grads[2]


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """How far a query looks back and ahead; less than 0 is as far as there are keys."""
    return -1 if left is None else left, 0 if is_causal else -1 if right is None else right


def register() -> None:
    """Let PyTorch find them, for as long as the process lives."""
    torch.library.impl("aten::_flash_attention_forward", "CPU", forward)
    torch.library.impl("aten::_flash_attention_backward", "CPU", backward)
