"""Where a tensor crosses between being whole on every rank of a tensor-parallel group and being a part on each.

Megatron's f and g (Shoeybi et al., 2019, arXiv:1909.08053, section 3) and their likes for outputs that are gathered.
Each backward is the transpose of its forward, so the gradient of a whole tensor is whole, and the same on all ranks.

In compiled blocks the collectives are operators (operators.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from engine.parallel import dist

Map = Callable[[Tensor, ProcessGroup], Tensor]


class _Crossing(Function):
    """A linear map `there` of a tensor, whose gradient goes `back` by the transpose of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map, group: ProcessGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(gradient, ctx.group), None, None, None


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """A whole tensor that each rank goes on to use differently: its gradients are summed over ranks."""
    return _Crossing.apply(x, _same, _sum, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The whole of which each rank has a summand."""
    return _Crossing.apply(x, _sum, _same, group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """(..., K) -> (..., K x ranks): the whole of which each rank has some of the last dimension, in rank order."""
    return _Crossing.apply(x, _join, _own_columns, group)  # type: ignore[no-any-return, no-untyped-call]


def split(x: Tensor, group: ProcessGroup) -> Tensor:
    """(..., K) -> (..., K / ranks): this rank's share of the last dimension of a whole tensor."""
    return _Crossing.apply(x, _own_columns, _join, group).contiguous()  # type: ignore[no-any-return, no-untyped-call]


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.zerochat.sum_over_mates(x, group.group_name)  # type: ignore[no-any-return]
    return sum_now(x, group)


def _join(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.zerochat.join_over_mates(x, group.group_name)  # type: ignore[no-any-return]
    return join_now(x, group)


def _own_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()]


def sum_now(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks."""
    return dist.all_reduce_sum(x.clone(), group)  # a copy: autograd may hold the same tensor elsewhere


def join_now(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's last dimension, one after another."""
    return torch.cat(dist.gather_tensors(x, group), dim=-1)
