"""Where a tensor crosses between being whole on every rank of a tensor-parallel group and being a part on each.

Megatron's f and g (Shoeybi et al., 2019, arXiv:1909.08053, section 3) and their likes for outputs that are gathered.
Each backward is the transpose of its forward, so the gradient of a whole tensor is whole, and the same on all ranks.

In compiled blocks the collectives are operators (operators.py).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from engine.parallel import dist


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(gradient, ctx.group), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _join(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _own_columns(gradient, ctx.group), None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_columns(x, group).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _join(gradient, ctx.group), None


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """A whole tensor that each rank goes on to use differently: its gradients are summed over ranks."""
    return _Copied.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The whole of which each rank has a summand."""
    return _Summed.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """The whole of which each rank has some of the last dimension, in rank order."""
    return _Gathered.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def split(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's share of the last dimension of a whole tensor."""
    return _Split.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.zerochat.sum_over_mates(x, group.group_name)  # type: ignore[no-any-return]
    return sum_now(x, group)


def _join(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.zerochat.join_over_mates(x, group.group_name)  # type: ignore[no-any-return]
    return join_now(x, group)


def sum_now(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks."""
    return dist.all_reduce_sum(x.clone(), group)  # a copy: autograd may hold the same tensor elsewhere


def join_now(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's last dimension, one after another."""
    return torch.cat(dist.gather_tensors(x, group), dim=-1)


def _own_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()]
