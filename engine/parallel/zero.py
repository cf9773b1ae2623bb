"""ZeRO stages 0 to 3 as settings of FSDP2 (`torch.distributed.fsdp.fully_shard`).

Stage 0 replicates on a mesh (W, 1). Stages 1 to 3 shard on a mesh (1, W). They differ in how long gathered parameters
and unreduced gradients live. FSDP2 always keeps the optimizer states with the shards.

On one rank, FSDP2 still gathers into buffers and reduces through others: it copies each gradient four times and each
parameter twice per micro-batch. Without offload, `ComputeCopies` therefore replaces FSDP2 on one rank: a module that
computes in the precision of its parameters stays as it is. Otherwise a copy of each fp32 master in compute precision
replaces the master in the module from `gather` to `release`. Gradients are added to the masters in fp32. Results equal
those of FSDP2 bit for bit. A module without an optimizer needs no FSDP2 at stage 0 either. All functions here support
both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engine import internals
from engine.config import EngineConfig
from engine.internals import tree_map
from engine.parallel import dist, meshes

T = TypeVar("T")


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a module: the elements of its outermost ModuleLists, in order, each once.

    Elements without parameters are left out. If an element is a container, its own elements are the blocks.
    """
    found: dict[nn.Module, None] = {}
    for child in module.children():
        inner = _elements(child) if isinstance(child, nn.ModuleList) else blocks(child)
        found.update(dict.fromkeys(inner))
    return list(found)


def _elements(container: nn.Module) -> Iterator[nn.Module]:
    for element in container.children():
        if type(element).forward is nn.Module.forward:  # a list or a dictionary, which has no forward
            yield from _elements(element)
        elif any(True for _ in element.parameters()):
            yield element


def units(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that are FSDP units: those that share no parameter with a module outside of them."""
    return _closed(module, blocks(module))


def outer_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers outside of the blocks that are FSDP units of their own; the root unit has all others.

    The module's method `outer_layers`, if it has one, returns layers whose parameters only their own forward uses
    (`as_forward`). A tied layer stays in the root unit: a pass uses its weight first and last, so the weight would be
    gathered at the peak of memory anyway.
    """
    declared: Sequence[nn.Module | None] = cast("Any", getattr(module, "outer_layers", tuple))()
    inside = {id(child) for block in blocks(module) for child in block.modules()}
    return _closed(module, [layer for layer in declared if layer is not None and id(layer) not in inside])


def _closed(module: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the parts of a module that have parameters and share none with a module outside of them."""
    uses = Counter(id(p) for child in module.modules() for p in child._parameters.values())

    def is_closed(part: nn.Module) -> bool:
        inside = Counter(id(p) for child in part.modules() for p in child._parameters.values() if p is not None)
        return bool(inside) and all(uses[parameter] == count for parameter, count in inside.items())

    return [part for part in parts if is_closed(part)]


def as_forward(layer: nn.Module, function: Callable[..., T], *inputs: Any) -> T:
    """Return `function(*inputs)`, which uses the parameters of a layer and runs as the layer's forward.

    The hooks of the layer run, so FSDP2 gathers the parameters.
    """
    own = vars(layer).get("forward")
    layer.forward = function  # type: ignore[method-assign]
    try:
        result: T = layer(*inputs)
        return result
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own  # type: ignore[method-assign]


def shard(
    module: nn.Module, config: EngineConfig, policy: MixedPrecisionPolicy, *, local_gradients: bool = False
) -> None:
    """Shard a module over the ranks, in place. Its parameters become DTensors on the mesh of the stage.

    Offloaded shards are on the host, pinned unless they move to NVMe. `local_gradients` (stage 0) reduces nothing, so
    that each rank has its own gradients.
    """
    from engine.parallel import comm_hooks

    stage, tier = config.zero_stage, config.offload_parameters
    zero_mesh = meshes.zero_mesh(stage=stage, shard_ranks=config.shard_ranks)
    replicate = 1 if local_gradients else zero_mesh["replicate"].size()
    # With a replicate dimension of size 1, FSDP2 would hold all reduced fp32 gradients until backward ends.
    mesh = zero_mesh[("shard",) if replicate == 1 else ("replicate", "shard")]
    offloads = tier != "none" and dist.world().device.type != "cpu"
    offload_policy = CPUOffloadPolicy(pin_memory=tier == "cpu") if offloads else OffloadPolicy()
    ranks = mesh["shard"].size()
    if comm_hooks.exchanges(ranks, config.compress) and stage >= 2 and policy.param_dtype == torch.bfloat16:
        # The exchange sums in fp32. Stages 0 and 1 accumulate in the precision of the reduction, which stays fp32.
        policy = replace(policy, reduce_dtype=torch.bfloat16)
    outer = outer_layers(module)
    # Backward starts with the root and the head: released after forward, they would be gathered again at once.
    first_in_backward = [module, *(layer for layer in outer if not isinstance(layer, nn.Embedding))]
    for unit in [*units(module), *outer, module]:
        reshard = stage == 3 and unit not in first_in_backward
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload_policy)
        comm_hooks.install(unit, replicate=replicate, ranks=ranks, compress=config.compress)
        if isinstance(unit, nn.Embedding):
            cast("FSDPModule", unit).set_unshard_in_backward(False)  # its gradient needs the tokens only
    internals.fill_missing_gradients(module)
    module.register_forward_pre_hook(_gather_outside_of_inference_mode, prepend=True)


def _gather_outside_of_inference_mode(module: nn.Module, _: Any) -> None:
    """Let FSDP2 allocate memory for gathered parameters, which could not be trained later as inference tensors."""
    if torch.is_inference_mode_enabled() and not gathered(module):
        with torch.inference_mode(False), torch.no_grad():
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.unshard()
                    unit.reshard()


def take_used(module: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of this rank's trained parameters, and of those that were used since the last call."""
    if compute_copies(module) is not None:
        return set(), set()
    used_shards = {id(shard) for shard in internals.take_used(module)}
    trained = {name: id(p) for name, p in module.named_parameters() if p.requires_grad and p.numel()}
    return set(trained), {name for name, key in trained.items() if key in used_shards}


def before_backward(module: nn.Module, *, stage: int, last: bool) -> None:
    """Set whether the next backward reduces gradients and releases parameters. `last` means the last one of a step."""
    if compute_copies(module) is None:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(last or stage >= 2)
        module.set_reshard_after_backward(last or stage == 3)


def release(module: nn.Module) -> None:
    """Release gathered parameters, so that the next use gathers the values of the last step."""
    copies = compute_copies(module)
    if copies is not None:
        copies.release()
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def discard(module: nn.Module) -> None:
    """Reset a module in the middle of a pass to its state before the forward, without gradients."""
    copies = compute_copies(module)
    if copies is not None:
        copies.discard()
    else:
        assert isinstance(module, FSDPModule)
        internals.discard_pass(module)


def sharded(module: nn.Module) -> list[Tensor]:
    """Return the parameters as they are stored between uses, whether gathered now or not."""
    copies = compute_copies(module)
    if copies is not None:
        gathered = set(copies.copies)
        return list(dict.fromkeys([*copies.masters, *(p for p in module.parameters() if p not in gathered)]))
    return internals.fsdp_shards(module)


def gathered(module: nn.Module) -> list[Tensor]:
    """Return the buffers of gathered parameters. Released buffers have no bytes."""
    copies = compute_copies(module)
    return internals.fsdp_gathered(module) if copies is None else list(copies.copies)


def gradients(module: nn.Module) -> list[Tensor]:
    """Return all current gradients: reduced ones, and full ones that wait for their reduction."""
    if compute_copies(module) is None:
        return internals.fsdp_gradients(module)
    return [parameter.grad for parameter in sharded(module) if parameter.grad is not None]


def parameter_names(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter of a module. Tied parameters have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def assign_parameter(module: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    """Replace the parameters of a module with these names by one parameter."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = parameter


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict contains, by name: running statistics, a router's correction, scales.

    Buffers that the module computes at construction (rotary frequencies) are not persistent.
    """
    return {
        f"{path}.{leaf}" if path else leaf: buffer
        for path, owner in module.named_modules()
        for leaf, buffer in owner._buffers.items()
        if buffer is not None and leaf not in owner._non_persistent_buffers_set
    }


def is_packed(layer: nn.Module) -> bool:
    """Return whether a layer is packed: its frozen weight is in buffers, in a format that only the layer knows.

    The method `full_weight` of such a layer returns the weight to export, as floating-point numbers.
    """
    return hasattr(layer, "full_weight")


def packed_weights(module: nn.Module) -> list[Tensor]:
    """Return the buffers of the packed layers of a module."""
    return [buffer for layer in module.modules() if is_packed(layer) for buffer in layer.buffers()]


def compute_copies(module: nn.Module) -> "ComputeCopies | None":
    """Return the copies of a module without FSDP2; None for others."""
    return vars(module).get("compute_copies")


class ComputeCopies:
    """Copies of a module's parameters in compute precision; none if `dtype` is None."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Let `module` compute in this precision. Its parameters may still be on the meta device."""
        vars(module)["compute_copies"] = self
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

    @torch.inference_mode(False)  # copies that are inference tensors could not be trained later
    @torch.no_grad()
    def gather(self) -> None:
        """Replace the masters by new copies, unless copies are already in the module."""
        if self._dtype is None or self._is_gathered:
            return
        if not self._slots:
            self._find_masters()
        for copy in self.copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        if self.copies:  # a frozen module has its parameters in compute precision
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
        for master, names in parameter_names(self._module).items():
            if not master.is_floating_point() or master.dtype == self._dtype:
                continue
            for owner, _, leaf in (name.rpartition(".") for name in names):
                self._slots.append((self._module.get_submodule(owner), leaf, len(self.masters)))
            self.masters.append(master)
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
