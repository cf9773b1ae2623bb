"""Sequence parallelism: neighbouring ranks hold the tokens of a row between them (DeepSpeed-Ulysses: Jacobs et al.,
2023, arXiv:2309.14509), so that a row as long as no rank could hold fits.

Everything but attention works on each token by itself: a rank takes its run of the row's tokens through it. Attention
sees all tokens, but works on each head by itself: so before it the ranks exchange (own tokens, all heads) for (all
tokens, own heads), and behind it back. What a token is scored with is put together at the end, a number each.

All ranks of a group are fed the same rows and compute the same loss of what was put together. Backward then hands each
rank the upstream gradient of its own tokens, and the gradient of a parameter is the sum over the group, as over ranks
with other data.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from engine.parallel import autograd_collectives, dist
from engine.parallel.comm_stats import count


def share_of(tokens: int) -> "Share | None":
    """This rank's share of a row of so many tokens; None where ranks have whole rows."""
    group = dist.sequence_group() if dist.world().sequence > 1 else None
    return None if group is None else Share(tokens, group.rank(), group.size())


def check_heads(heads: int, ranks: int) -> None:
    """Raises ValueError where attention heads can't be dealt out evenly."""
    if heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"sequence_parallel={ranks} does not divide the {heads} attention heads; {fitting} do")


@dataclass(frozen=True)
class Share:
    """Equal runs of a row of `tokens` tokens, filled up at its end, one a rank; `rank` has this one."""

    tokens: int
    rank: int
    ranks: int

    @property
    def own(self) -> int:
        """Tokens of a rank."""
        return -(-self.tokens // self.ranks)

    @property
    def filling(self) -> int:
        """Tokens behind the row's end."""
        return self.own * self.ranks - self.tokens

    @property
    def first(self) -> int:
        """Where this rank's tokens begin."""
        return self.rank * self.own

    def cut(self, row: Tensor) -> Tensor:
        """(1, tokens) -> (1, own): this rank's; the last token once more is the filling."""
        return torch.cat([row, row[:, -1:].expand(1, self.filling)], dim=1).narrow(1, self.first, self.own)

    def mine(self, places: Tensor) -> Tensor:
        """Which of the `places` (N,) in the row are this rank's: (M,) indices into them. On a GPU the host waits."""
        return ((places >= self.first) & (places < self.first + self.own)).nonzero().squeeze(1)

    def together(self, values: Tensor, which: Tensor, count: int) -> Tensor:
        """(count,), on every rank, of which this one has `values` (M,) at the indices `which` (M,); others the rest.

        The upstream gradient has to be the same on all ranks.
        """
        own = values.new_zeros(count).index_copy(0, which, values)
        return autograd_collectives.summed(own, dist.sequence_group())

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1, heads, own tokens, size) each -> (1, own heads, all tokens, size), the filling among them.

        Key heads that don't divide by the ranks are repeated as often as it takes. Raises ValueError where query heads
        don't divide.
        """
        assert query.shape[0] == 1 and query.shape[2] == self.own, "one row, of which each rank has its share"
        check_heads(query.shape[1], self.ranks)
        times = math.lcm(key.shape[1], self.ranks) // key.shape[1]
        if times > 1:
            key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        parts = [_by_rank(tensor, self.ranks) for tensor in (query, key, value)]
        row = _exchanged(torch.cat(parts, dim=-1)).flatten(0, 1)  # (all tokens, numbers of own heads)
        whole = row.split([part.shape[-1] for part in parts], dim=-1)
        q, k, v = (
            each.unflatten(-1, (-1, like.shape[-1])).transpose(0, 1)[None]
            for each, like in zip(whole, (query, key, value), strict=True)
        )
        return q, k, v

    def by_tokens(self, attended: Tensor) -> Tensor:
        """(1, all tokens, own heads, size) -> (1, own tokens, all heads, size)."""
        size = attended.shape[-1]
        parts = attended[0].unflatten(0, (self.ranks, self.own)).flatten(2)
        return _exchanged(parts).transpose(0, 1).reshape(1, self.own, -1, size)


def _by_rank(tensor: Tensor, ranks: int) -> Tensor:
    """(1, heads, tokens, size) -> (ranks, tokens, heads / ranks * size)."""
    return tensor[0].unflatten(0, (ranks, -1)).transpose(1, 2).flatten(2)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        return _received(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _received(gradient)


def _exchanged(parts: Tensor) -> Tensor:
    """Part r of `parts` (ranks, ...) goes to rank r; what came here. It is its own transpose."""
    return _Exchange.apply(parts)  # type: ignore[no-any-return, no-untyped-call]


def _received(parts: Tensor) -> Tensor:
    parts = parts.contiguous()
    count("other", parts[0].nbytes * (len(parts) - 1))
    received = torch.empty_like(parts)
    dist.all_to_all(received, parts, dist.sequence_group())
    return received
