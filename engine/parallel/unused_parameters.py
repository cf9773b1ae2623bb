"""Parameters without a gradient on some ranks, such as the experts that no token of a rank was routed to.

FSDP2 reduces the gradients that exist. Ranks with different gradients would wait for each other or sum gradients of
different parameters. A unit used only in the last micro-batch would have gradients in two precisions. Therefore zeros
replace missing gradients in each reduction. At the step, the ranks find the parameters that none of them used: these
have no gradient, as on one rank. Not supported: a unit whose forward only some ranks run.

Uses private names of FSDP2, which are the same from torch 2.11 to 2.13.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from engine.parallel import dist


class ParameterUsage:
    """The parameters of one FSDP group that had a gradient since `reset`, and those whose gradient became zeros."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._post_backward: Callable[..., None] = group.post_backward
        self._used: dict[int, Any] = {}
        self._filled: dict[int, Any] = {}
        group.post_backward = self._fill_and_post_backward

    def _fill_and_post_backward(self, *args: Any) -> None:
        if self._group.reduce_grads:
            self._fill_missing()
        self._post_backward(*args)

    @torch.no_grad()
    def _fill_missing(self) -> None:
        """Give all gathered parameters a gradient in one precision."""
        gathered = [p for p in self._group.fsdp_params if hasattr(p, "_unsharded_param")]
        trained = [p for p in gathered if p._unsharded_param.requires_grad]
        accumulates = any(p.unsharded_accumulated_grad is not None for p in trained)
        for parameter in trained:
            full = parameter._unsharded_param
            if not full.numel():  # FSDP2 cannot reduce empty gradients
                full.grad = parameter.unsharded_accumulated_grad = None
                continue
            if parameter.unsharded_accumulated_grad is None and full.grad is None:
                full.grad = torch.zeros_like(full)
                self._filled[id(parameter)] = parameter
            else:
                self._used[id(parameter)] = parameter
            if accumulates and parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = full.grad.to(parameter.reduce_dtype)
                full.grad = None

    def used(self) -> list[nn.Parameter]:
        """Return the shards of the parameters that had a gradient."""
        return [parameter.sharded_param for parameter in self._used.values()]

    def unused(self) -> list[nn.Parameter]:
        """Return the shards of the parameters that had no gradient."""
        return [parameter.sharded_param for key, parameter in self._filled.items() if key not in self._used]

    def reset(self) -> None:
        """Start a new step."""
        self._used.clear()
        self._filled.clear()


def watch(group: Any) -> None:
    """Record the usage of an FSDP group's parameters, as an attribute of the group."""
    group.parameter_usage = ParameterUsage(group)


def usage_of(group: Any) -> ParameterUsage:
    usage: ParameterUsage = group.parameter_usage
    return usage


def unused_on_all_ranks(module: nn.Module, usages: Iterable[ParameterUsage]) -> set[str]:
    """Return the names of the parameters that no rank used since the last call. Every rank calls, once per step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    used, unused = set[str](), set[str]()
    for usage in usages:
        used.update(names[id(shard)] for shard in usage.used())
        unused.update(names[id(shard)] for shard in usage.unused())
        usage.reset()
    if dist.max_over_ranks(float(len(unused))) == 0.0:
        return set()
    return unused.difference(*dist.gather_objects(used))
