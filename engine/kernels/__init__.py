"""Kernels: one public name each, which picks the implementation.

Triton serves CUDA tensors, a function in C some of the CPU's where it can be compiled (`host`), torch everything else,
under the same signature; the torch functions, each in a file with the kernel's name, say what the names mean and are
what the others are tested against. Triton is imported when a CUDA tensor first comes along.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from engine.kernels.decode_attention import decode_attention as _decode_attention
from engine.kernels.gae import gae as _gae
from engine.kernels.host import decode_attention as _host_decode_attention
from engine.kernels.sample import sample as _sample
from engine.kernels.split_logprobs import Pieces, Reduce
from engine.kernels.split_logprobs import split_token_logprobs as _split_token_logprobs
from engine.kernels.token_logprobs import gradients, statistics
from engine.kernels.token_logprobs import token_logprobs as _token_logprobs
from engine.rollout.sampling import Sampling

__all__ = ["Reduce", "decode_attention", "gae", "sample", "split_token_logprobs", "token_logprobs"]

_HAS_TRITON = find_spec("triton") is not None  # PyTorch's CUDA builds for Linux bring it
_TORCH: dict[str, Callable[..., Any]] = {
    "decode_attention": _decode_attention,
    "gae": _gae,
    "sample": _sample,
    "token_logprobs": _token_logprobs,
}
_HOST: dict[str, Any] = {"decode_attention": _host_decode_attention}


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` (N,) and entropies, (N,) fp32 each: see token_logprobs.py."""
    pick = _pick("token_logprobs", hidden)
    logprobs, entropy = pick(hidden, weight, targets, temperature, bias, softcap)
    return logprobs, entropy


def split_token_logprobs(
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    first: int,
    reduce: Reduce,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` with a head split over ranks, of which `rows` are this one's: see split_logprobs.py."""
    pieces = Pieces(statistics, gradients)
    if hidden.is_cuda and _HAS_TRITON:
        pieces = Pieces(_triton("token_logprobs", "statistics"), _triton("token_logprobs", "gradients"))
    return _split_token_logprobs(hidden, rows, targets, first, reduce, pieces, temperature, bias, softcap)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    alibi: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention (B, H, Dv) of one query token a sequence over its part of a cache: see decode_attention.py."""
    out: Tensor = _pick("decode_attention", query)(query, keys, values, slots, lengths, scale, window, alibi, softcap)
    return out


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, returns (B, R) and the advantages' count, mean and squared deviations (3,): see gae.py."""
    advantages, returns, moments = _pick("gae", rewards)(rewards, values, mask, gamma=gamma, lam=lam)
    return advantages, returns, moments


def sample(logits: Tensor, streams: Tensor, positions: Tensor, how: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probabilities (B,) fp32, drawn from logits (B, V): see sample.py."""
    tokens, logprobs = _pick("sample", logits)(logits, streams, positions, how)
    return tokens, logprobs


def _pick(name: str, tensor: Tensor) -> Callable[..., Any]:
    if tensor.is_cuda and _HAS_TRITON:
        return _triton(name, name)
    if name in _HOST and tensor.device.type == "cpu" and tensor.dtype in _HOST[name].DTYPES and _HOST[name].available():
        function: Callable[..., Any] = getattr(_HOST[name], name)
        return function
    return _TORCH[name]


@cache
def _triton(kernel: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"engine.kernels.{kernel}_triton"), name)
    return function
