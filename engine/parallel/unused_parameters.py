"""Parameters that a rank's backward gave no gradient, of units that other ranks may have used whole.

FSDP2 reduces the gradients that there are, so ranks that disagree on them would wait for each other, or add up other
parameters' numbers; and a unit that a step used in its last micro-batch alone has gradients in two precisions. So what
is missing is sent as zeros, and at the step all ranks agree on what none of them used: that has no gradient then, as
without ranks. Left out: a unit whose forward only some ranks run, since those would gather it alone.

Names of FSDP2 that are private, the same from torch 2.11 to 2.13.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from engine.parallel import dist


class Usage:
    """Which parameters of one FSDP group had a gradient since `forget`, and which had none and were sent as zeros."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._inner: Callable[..., None] = group.post_backward
        self._used: dict[int, Any] = {}
        self._filled: dict[int, Any] = {}
        group.post_backward = self._post_backward

    def _post_backward(self, *unused: Any) -> None:
        if self._group.reduce_grads:
            self._complete()
        self._inner(*unused)

    @torch.no_grad()
    def _complete(self) -> None:
        """Give all parameters a gradient, of one precision; those that no forward gathered yet are left out."""
        trained = [p for p in self._group.fsdp_params if hasattr(p, "_unsharded_param")]
        trained = [p for p in trained if p._unsharded_param.requires_grad]
        accumulates = any(p.unsharded_accumulated_grad is not None for p in trained)
        for parameter in trained:
            whole = parameter._unsharded_param
            if not whole.numel():  # FSDP2 can't send nothing
                whole.grad = parameter.unsharded_accumulated_grad = None
                continue
            if parameter.unsharded_accumulated_grad is None and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
                self._filled[id(parameter)] = parameter
            else:
                self._used[id(parameter)] = parameter
            if accumulates and parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = whole.grad.to(parameter.reduce_dtype)
                whole.grad = None

    def used(self) -> list[nn.Parameter]:
        """The shards of those that had a gradient."""
        return [parameter.sharded_param for parameter in self._used.values()]

    def missing(self) -> list[nn.Parameter]:
        """The shards of those that never had one."""
        return [parameter.sharded_param for key, parameter in self._filled.items() if key not in self._used]

    def forget(self) -> None:
        """Begin anew."""
        self._used.clear()
        self._filled.clear()


def watch(group: Any) -> None:
    """Keep account of an FSDP group, with the group itself: so that the two go together."""
    group.usage = Usage(group)


def usage_of(group: Any) -> Usage:
    found: Usage = group.usage
    return found


def by_no_rank(module: nn.Module, usages: Iterable[Usage]) -> set[str]:
    """Names of the parameters that were sent as zeros by all ranks that have them. Every rank calls, once a step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    used, missing = set[str](), set[str]()
    for usage in usages:
        used.update(names[id(shard)] for shard in usage.used())
        missing.update(names[id(shard)] for shard in usage.missing())
        usage.forget()
    if dist.max_over_ranks(float(len(missing))) == 0.0:
        return set()
    return missing.difference(*dist.gather_objects(used))
