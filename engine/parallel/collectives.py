"""Collectives of tensors in a pass or a step, with a count of the bytes that this rank sends.

The count assumes that every byte takes the shortest path: a gather sends this rank's shard to each other rank, a
reduction sends each other rank its part, and an all-reduce does both. `Kind` is the purpose of the bytes: parameters
(gather), gradients (reduce), or anything else.

Some collectives have gradients, for tensors that are full on every rank of a group or split over its ranks: Megatron's
f and g (Shoeybi et al., 2019, arXiv:1909.08053, section 3), and the same for gathered outputs. Each backward is the
transpose of its forward. The gradient of a full tensor is therefore full, and equal on all ranks. Compiled blocks call
torch's functional collectives, which the compiler can trace. Their bytes are not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from engine.internals import functional_collectives
from engine.parallel import dist

Kind = Literal["gather", "reduce", "other"]
LinearMap = Callable[[Tensor, ProcessGroup], Tensor]


@dataclass(frozen=True)
class SentBytes:
    """The bytes that a rank sent: for parameters, for gradients, and for anything else."""

    gather: int = 0
    reduce: int = 0
    other: int = 0

    def __sub__(self, before: "SentBytes") -> "SentBytes":
        return SentBytes(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        return self.gather + self.reduce + self.other


_sent = SentBytes()


def bytes_sent() -> SentBytes:
    """Return the bytes that this process has sent since it started."""
    return _sent


def count_bytes(kind: Kind, size: int) -> None:
    """Count `size` bytes that another library sends."""
    global _sent
    _sent = replace(_sent, **{kind: getattr(_sent, kind) + size})


def count_all_reduce(kind: Kind, tensor: Tensor, ranks: int) -> None:
    """Count an all-reduce of a tensor over `ranks` ranks."""
    count_bytes(kind, 2 * tensor.nbytes * (ranks - 1) // ranks)


def all_reduce(
    tensor: Tensor, group: ProcessGroup | None = None, *, op: Literal["sum", "max"] = "sum", kind: Kind = "other"
) -> Tensor:
    """Compute the sum or the elementwise maximum over ranks, in place; return the tensor."""
    if dist.world().size > 1:
        count_all_reduce(kind, tensor, group.size() if group is not None else dist.world().size)
        with dist.observed("all_reduce", tensor.shape):
            torch_dist.all_reduce(tensor, getattr(torch_dist.ReduceOp, op.upper()), group)
    return tensor


def gather_tensors(tensor: Tensor, group: ProcessGroup, *, kind: Kind = "other") -> Tensor:
    """Return the tensors of all ranks of a group, stacked in rank order. They have the same shape."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    all_gather(gathered.view(-1), tensor.reshape(-1), group, kind=kind)
    return gathered


def all_gather(output: Tensor, local: Tensor, group: ProcessGroup | None = None, *, kind: Kind = "gather") -> None:
    """Write the tensors (n,) of all ranks to `output` (ranks * n,), in rank order."""
    count_bytes(kind, output.nbytes - local.nbytes)
    gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor  # renamed in 2.13
    with dist.observed("all_gather", local.shape):
        if local.device.type == "cpu":
            ranks = torch_dist.get_world_size(group)
            _exchange_pairwise(output.view(ranks, -1), [local] * ranks, group)
        else:
            gather(output, local, group=group)


def all_to_all(rows: Tensor, group: ProcessGroup | None = None, *, kind: Kind) -> Tensor:
    """Send row r of `rows` (ranks, ...) to rank r; return the received rows in rank order, in the same shape."""
    count_bytes(kind, rows[0].nbytes * (len(rows) - 1))
    received = torch.empty_like(rows)
    with dist.observed("all_to_all", rows.shape):
        if rows.device.type == "cpu":
            _exchange_pairwise(received, rows, group)
        else:
            torch_dist.all_to_all_single(received, rows, group=group)
    return received


def _exchange_pairwise(received: Tensor, sent: Sequence[Tensor] | Tensor, group: ProcessGroup | None) -> None:
    """Send `sent[r]` to rank r and write the tensor of rank r to `received[r]`, on the CPU.

    Gloo's own all-gather and all-to-all pass all data through buffers that they allocate. Two ranks took 1.4 to 3.1
    times as long with them (1 to 64 MB, two CPU cores).
    """
    own = torch_dist.get_rank(group)
    others = [rank for rank in range(len(received)) if rank != own]
    pending = [torch_dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
    pending += [torch_dist.isend(sent[rank], group=group, group_dst=rank) for rank in others]
    received[own].copy_(sent[own])
    for work in pending:
        work.wait()  # type: ignore[union-attr]


def broadcast(tensor: Tensor, *, source: int, group: ProcessGroup | None = None) -> Tensor:
    """Overwrite a contiguous tensor with that of rank `source` of the group; return the tensor."""
    if torch_dist.get_rank(group) == source:
        count_bytes("other", tensor.nbytes * (torch_dist.get_world_size(group) - 1))
    with dist.observed("broadcast", tensor.shape):
        torch_dist.broadcast(tensor, group=group, group_src=source)
    return tensor


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
        return functional_collectives.all_reduce(x, "sum", group)
    return all_reduce(x.clone(), group)  # a copy: autograd may hold the same tensor


def _concatenate(x: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_collectives.all_gather_tensor(x, x.ndim - 1, group)
    return torch.cat(list(gather_tensors(x, group)), dim=-1)


def _exchange(rows: Tensor, group: ProcessGroup) -> Tensor:
    return all_to_all(rows.contiguous(), group, kind="other")


def _own_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()]
