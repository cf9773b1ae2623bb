"""Collectives among mates as operators that a compiler can't look into: in compiled blocks they are counted, and noted
where healing wants to know of them, as they are elsewhere.
"""

from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# It has no public name, the same from torch 2.11 to 2.13.
from torch.distributed.distributed_c10d import _resolve_process_group

from engine.parallel import autograd_collectives


def _called(name: str) -> ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]


@cache
def define() -> None:
    """Make them known to PyTorch, before blocks are compiled; nobody else needs them."""

    @torch.library.custom_op("zerochat::sum_over_mates", mutates_args=())
    def summed(x: Tensor, group: str) -> Tensor:
        return autograd_collectives.sum_now(x, _called(group))

    @torch.library.custom_op("zerochat::join_over_mates", mutates_args=())
    def joined(x: Tensor, group: str) -> Tensor:
        return autograd_collectives.join_now(x, _called(group))

    @summed.register_fake
    def _(x: Tensor, group: str) -> Tensor:
        return torch.empty_like(x)

    @joined.register_fake
    def _(x: Tensor, group: str) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] * _called(group).size())
