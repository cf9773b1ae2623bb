"""`token_logprobs` with a head that is split over ranks by rows of the vocabulary (vocabulary parallelism; Shoeybi et
al., 2019, arXiv:1909.08053).

Each rank reduces its own rows to three numbers a token - log-sum-exp lse_r, entropy H_r, the target's logit if it is
among them - and ranks exchange those alone, never logits. With m = max_r lse_r and w_r = e^(lse_r - m):

    lse = m + log sum_r w_r        entropy = lse + sum_r w_r (H_r - lse_r) / sum_r w_r        logprob = z_y - lse

Backward is that of the whole head over the rank's rows, with lse and entropy of the whole; the hidden states' gradient
is the sum over ranks. How numbers travel is the caller's: this file is told two functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels.token_logprobs import Head, check, wanted


@dataclass(frozen=True)
class Reduce:
    """Largest and sum over the ranks that share a head, elementwise, each of a tensor that may be overwritten."""

    largest: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pieces:
    """`statistics` and `gradients` of an implementation (token_logprobs.py, or the Triton one beside it)."""

    statistics: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradients: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]


def split_token_logprobs(
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    first: int,
    reduce: Reduce,
    pieces: Pieces,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, (N,) fp32 each, the same on every rank.

    hidden: (N, D) and targets: (N,) int64 are the same on every rank that shares the head; rows: (V_r, D) are this
    rank's, of which the first is row `first` of the head, and bias (V_r,) is theirs. Every rank calls, forward and
    backward, with the same upstream gradients; d hidden comes out whole, d rows and d bias are the rank's own.
    Raises ValueError where the shapes don't fit or the temperature is not positive.
    """
    check(hidden, rows, targets, temperature)
    logprobs, entropy = _Split.apply(hidden, rows, targets - first, bias, reduce, pieces, Head(temperature, softcap))
    return logprobs, entropy


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        rows: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        reduce: Reduce,
        pieces: Pieces,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.reduce, ctx.pieces, ctx.head = reduce, pieces, head
        logprobs, entropies, lses = pieces.statistics(head, hidden, rows, targets, bias)
        highest = reduce.largest(lses.clone())
        shares = (lses - highest).exp()
        sums = reduce.sum(torch.stack([shares, shares * (entropies - lses + highest), logprobs + lses]))
        from_highest = sums[0].log()
        entropy = from_highest + sums[1] / sums[0]
        ctx.save_for_backward(hidden, rows, targets, bias, highest + from_highest, entropy)
        return sums[2] - highest - from_highest, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, rows, targets, bias, lse, entropy = ctx.saved_tensors
        d_hidden, d_rows, d_bias = ctx.pieces.gradients(
            ctx.head, hidden, rows, targets, bias, lse, entropy, *upstream, wants=wanted(ctx)
        )
        if d_hidden is not None:
            d_hidden = ctx.reduce.sum(d_hidden).to(hidden.dtype)
        return d_hidden, (None if d_rows is None else d_rows.to(rows.dtype)), None, d_bias, None, None, None
