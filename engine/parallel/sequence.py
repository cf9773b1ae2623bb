"""Sequence parallelism: neighbouring ranks share the tokens of a row that is too long for one rank.

DeepSpeed-Ulysses: Jacobs et al., 2023, arXiv:2309.14509. All modules except attention process each token separately, so
a rank runs them on its own consecutive tokens. Attention processes each head separately: before it, an all-to-all
exchanges (own tokens, all heads) for (all tokens, own heads), and after it the reverse. The scores of the tokens, one
number each, are gathered at the end.

All ranks of a group get the same rows and compute the same loss from the gathered scores. In backward each rank gets
the upstream gradient of its own tokens. The gradient of a parameter is the sum over the group, as over ranks with
different data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.parallel import collectives, dist, meshes


def sequence_shard(tokens: int) -> "SequenceShard | None":
    """Return this rank's shard of a row of `tokens` tokens; None without sequence parallelism."""
    group = meshes.sequence_group() if dist.world().sequence > 1 else None
    return None if group is None else SequenceShard(tokens, group.rank(), group.size())


def check_heads(heads: int, ranks: int) -> None:
    """Raises ValueError if the ranks do not divide the attention heads."""
    if heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"sequence_parallel={ranks} does not divide the {heads} attention heads; {fitting} do")


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of rank `rank` of `ranks`: a row of `tokens` tokens is padded at its end and cut into equal shards."""

    tokens: int
    rank: int
    ranks: int

    @property
    def length(self) -> int:
        """The number of tokens per rank, with padding."""
        return -(-self.tokens // self.ranks)

    @property
    def padding(self) -> int:
        """The number of padding tokens of the row."""
        return self.length * self.ranks - self.tokens

    @property
    def first(self) -> int:
        """The position of this rank's first token."""
        return self.rank * self.length

    def local_tokens(self, row: Tensor) -> Tensor:
        """Return this rank's tokens: (1, tokens) -> (1, length). The padding repeats the last token."""
        return torch.cat([row, row[:, -1:].expand(1, self.padding)], dim=1).narrow(1, self.first, self.length)

    def local_indices(self, positions: Tensor) -> Tensor:
        """Return the indices (M,) of this rank's tokens in `positions` (N,) of the row. Synchronizes a GPU."""
        return ((positions >= self.first) & (positions < self.first + self.length)).nonzero().squeeze(1)

    def gather_scores(self, values: Tensor, indices: Tensor, count: int) -> Tensor:
        """Return (count,) scores on every rank, of which this rank has `values` (M,) at `indices` (M,).

        The upstream gradient must be the same on all ranks.
        """
        local = values.new_zeros(count).index_copy(0, indices, values)
        return collectives.summed(local, meshes.sequence_group())

    def tokens_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange (1, heads, own tokens, size) for (1, own heads, all tokens, size), padding included.

        Key heads are repeated if the ranks do not divide them. Raises ValueError if they do not divide the query heads.
        """
        assert query.shape[0] == 1 and query.shape[2] == self.length, "expected one row, sharded over the ranks"
        check_heads(query.shape[1], self.ranks)
        times = math.lcm(key.shape[1], self.ranks) // key.shape[1]
        if times > 1:
            key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        rows = [_by_rank(tensor, self.ranks) for tensor in (query, key, value)]
        full = collectives.exchanged(torch.cat(rows, dim=-1), meshes.sequence_group())
        full = full.flatten(0, 1)  # (all tokens, elements of own heads)
        split = full.split([row.shape[-1] for row in rows], dim=-1)
        q, k, v = (
            each.unflatten(-1, (-1, like.shape[-1])).transpose(0, 1)[None]
            for each, like in zip(split, (query, key, value), strict=True)
        )
        return q, k, v

    def heads_to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange (1, all tokens, own heads, size) for (1, own tokens, all heads, size)."""
        size = attended.shape[-1]
        rows = attended[0].unflatten(0, (self.ranks, self.length)).flatten(2)
        exchanged = collectives.exchanged(rows, meshes.sequence_group())
        return exchanged.transpose(0, 1).reshape(1, self.length, -1, size)


def _by_rank(tensor: Tensor, ranks: int) -> Tensor:
    """Reshape (1, heads, tokens, size) to (ranks, tokens, heads / ranks * size)."""
    return tensor[0].unflatten(0, (ranks, -1)).transpose(1, 2).flatten(2)
