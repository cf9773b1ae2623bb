"""One rank has nothing to send: its module stays as it is, with stand-ins for its parameters while it computes.

FSDP2 on one rank gathers into buffers and reduces through others all the same: each gradient is copied four times, each
parameter twice a micro-batch (profiled on a CPU, OPT-125M in bf16: copies took a third of a training step). Here a
module that computes in the precision of its parameters is left alone. Otherwise each fp32 master has a copy in compute
precision that takes its place in the module from `gather` to `release`; gradients go to the masters, in fp32, as they
arrive.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map


def attach(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Let a module compute as `policy` says, whole. Its parameters may be on the meta device still."""
    vars(module)["stand_ins"] = StandIns(module, policy.param_dtype)  # with the module: what refers to it goes with it


def of(module: nn.Module) -> "StandIns | None":
    """The stand-ins of a module that `attach` was called for; None for others."""
    return vars(module).get("stand_ins")


class StandIns:
    """The copies of one module's parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._module, self._dtype = module, dtype
        self._places: list[tuple[nn.Module, str]] = []
        self.masters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        self._in_place = False
        if dtype is not None:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, module: nn.Module, inputs: Any, keywords: Any) -> Any:
        """As FSDP2 does: parameters and inputs that are not whole numbers in compute precision."""
        self.gather()
        return tree_map(self._cast, (inputs, keywords))

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def gather(self) -> None:
        """Put fresh copies in the masters' places, where they are not in place yet."""
        if self._dtype is None or self._in_place:
            return
        self._find()
        for copy in self.copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        with torch.no_grad():
            torch._foreach_copy_([*self.copies], [*self.masters])
        self._put(self.copies)
        self._in_place = True

    def release(self) -> None:
        """Put the masters back."""
        if self._in_place:
            self._put(self.masters)
            self._in_place = False
            for copy in self.copies:
                copy.grad = None
                copy.untyped_storage().resize_(0)

    def discard(self) -> None:
        """Put the masters back, and forget all gradients."""
        self.release()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _find(self) -> None:
        """The masters as they are now, and where each stands; tied ones stand in several places."""
        if self._places:
            return
        number: dict[int, int] = {}
        for owner in self._module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                    self._places.append((owner, name))
                    if number.setdefault(id(parameter), len(self.masters)) == len(self.masters):
                        self.masters.append(parameter)
        self._owners = [number[id(owner._parameters[name])] for owner, name in self._places]
        for master in self.masters:
            copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype), requires_grad=master.requires_grad)
            if master.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(_hand_over, master))
            self.copies.append(copy)

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for (owner, name), which in zip(self._places, self._owners, strict=True):
            owner._parameters[name] = parameters[which]


def _hand_over(master: nn.Parameter, copy: Tensor) -> None:
    """Add a copy's gradient to its master's, in fp32."""
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad += copy.grad
    copy.grad = None
