"""Collectives with gradients, for tensors that are full on every rank of a group or split over its ranks.

Megatron's f and g (Shoeybi et al., 2019, arXiv:1909.08053, section 3), and the same for gathered outputs. Each backward
is the transpose of its forward. The gradient of a full tensor is therefore full, and equal on all ranks.

Compiled blocks call torch's functional collectives, which the compiler can trace. Their bytes are not counted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from engine.parallel import collectives

LinearMap = Callable[[Tensor, ProcessGroup], Tensor]


class _LinearFunction(Function):
    """A linear map of a tensor, with its transpose as backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: LinearMap, backward: LinearMap, group: ProcessGroup) -> Tensor:
        ctx.backward_map, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.backward_map(gradient, ctx.group), None, None, None


def _apply(x: Tensor, forward: LinearMap, backward: LinearMap, group: ProcessGroup) -> Tensor:
    return _LinearFunction.apply(x, forward, backward, group)  # type: ignore[no-any-return, no-untyped-call]


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return a full tensor that each rank uses differently. Its gradients are summed over ranks."""
    return _apply(x, _identity, _sum, group)


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the ranks' tensors."""
    return _apply(x, _sum, _identity, group)


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the last dimension of the ranks' tensors, in rank order: (..., K) -> (..., K * ranks)."""
    return _apply(x, _concatenate, _own_columns, group)


def split(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of the last dimension of a full tensor: (..., K) -> (..., K / ranks)."""
    return _apply(x, _own_columns, _concatenate, group).contiguous()


def exchanged(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Send row r of `rows` (ranks, ...) to rank r; return the received rows. The function is its own transpose."""
    return _apply(rows, _exchange, _exchange, group)


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x, "sum", group)
    return collectives.all_reduce_sum(x.clone(), group)  # a copy: autograd may hold the same tensor


def _concatenate(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x, x.ndim - 1, group)
    return torch.cat(collectives.gather_tensors(x, group), dim=-1)


def _exchange(rows: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_to_all(rows.contiguous(), group, kind="other")


def _own_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()]
