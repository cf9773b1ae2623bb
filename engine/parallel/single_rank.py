"""Mixed precision on one rank without FSDP2.

On one rank, FSDP2 still gathers into buffers and reduces through others: it copies each gradient four times and each
parameter twice per micro-batch. Here a module that computes in the precision of its parameters stays as it is.
Otherwise a copy of each fp32 master in compute precision replaces the master in the module from `gather` to `release`.
Gradients are added to the masters in fp32. Results equal those of FSDP2 bit for bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map


def attach(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Let a module compute in the precision of `policy`. Its parameters may still be on the meta device."""
    vars(module)["compute_copies"] = ComputeCopies(module, policy.param_dtype)


def compute_copies(module: nn.Module) -> "ComputeCopies | None":
    """Return the copies of a module for which `attach` was called; None for others."""
    return vars(module).get("compute_copies")


class ComputeCopies:
    """Copies of a module's parameters in compute precision; none if `dtype` is None."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._module, self._dtype = module, dtype
        self._slots: list[tuple[nn.Module, str, int]] = []  # owner, name, and index of the master
        self.masters: list[nn.Parameter] = []
        self.copies: list[nn.Parameter] = []
        self._is_gathered = False
        if dtype is not None:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast parameters and floating-point inputs, as FSDP2 does."""
        self.gather()
        return tree_map(self._cast, (args, kwargs))

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def gather(self) -> None:
        """Replace the masters by new copies, unless copies are already in the module."""
        if self._dtype is None or self._is_gathered:
            return
        if not self._slots:
            self._find_masters()
        for copy in self.copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        with torch.no_grad():
            torch._foreach_copy_([*self.copies], [*self.masters])
        self._set_parameters(self.copies)
        self._is_gathered = True

    def release(self) -> None:
        """Put the masters back and free the copies."""
        if self._is_gathered:
            self._set_parameters(self.masters)
            self._is_gathered = False
            for copy in self.copies:
                copy.grad = None
                copy.untyped_storage().resize_(0)

    def discard(self) -> None:
        """Put the masters back and drop all gradients."""
        self.release()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _find_masters(self) -> None:
        """Find the parameters with another precision, and all their slots; tied parameters have several."""
        indices: dict[int, int] = {}
        for owner in self._module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or not parameter.is_floating_point() or parameter.dtype == self._dtype:
                    continue
                if id(parameter) not in indices:
                    indices[id(parameter)] = len(self.masters)
                    self.masters.append(parameter)
                self._slots.append((owner, name, indices[id(parameter)]))
        for master in self.masters:
            copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype), requires_grad=master.requires_grad)
            if master.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(_move_gradient, master))
            self.copies.append(copy)

    def _set_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        for owner, name, index in self._slots:
            owner._parameters[name] = parameters[index]


def _move_gradient(master: nn.Parameter, copy: Tensor) -> None:
    """Add the gradient of a copy to that of its master, in fp32."""
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad += copy.grad
    copy.grad = None
