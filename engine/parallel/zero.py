"""ZeRO stages 0 to 3 as settings of FSDP2 (`torch.distributed.fsdp.fully_shard`).

Stage 0 replicates on a mesh (W, 1). Stages 1 to 3 shard on a mesh (1, W). They differ in how long gathered parameters
and unreduced gradients live. FSDP2 always keeps the optimizer states with the shards. On one rank without offload,
`engine/parallel/single_rank.py` replaces FSDP2; all functions here support both.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engine.config import Compress
from engine.parallel import comm_hooks, dist, dtensors, meshes, single_rank


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
    uses = Counter(id(p) for child in module.modules() for p in child._parameters.values())

    def is_closed(block: nn.Module) -> bool:
        inside = Counter(id(p) for child in block.modules() for p in child._parameters.values() if p is not None)
        return bool(inside) and all(uses[parameter] == count for parameter, count in inside.items())

    return [block for block in blocks(module) if is_closed(block)]


def shard(
    module: nn.Module,
    *,
    stage: int,
    policy: MixedPrecisionPolicy,
    offload: bool = False,
    pin: bool = True,
    shard_ranks: int | None = None,
    compress: Compress = "none",
    local_gradients: bool = False,
) -> None:
    """Shard a module over the ranks, in place. Its parameters become DTensors on the mesh of the stage.

    `offload` keeps the shards on the host, and `pin` pins them there. `local_gradients` (stage 0) reduces nothing, so
    that each rank has its own gradients.
    """
    zero_mesh = meshes.zero_mesh(stage=stage, shard_ranks=shard_ranks)
    replicate = 1 if local_gradients else zero_mesh["replicate"].size()
    # With a replicate dimension of size 1, FSDP2 would hold all reduced fp32 gradients until backward ends.
    mesh = zero_mesh[("shard",) if replicate == 1 else ("replicate", "shard")]
    offloads = offload and dist.world().device.type != "cpu"
    offload_policy = CPUOffloadPolicy(pin_memory=pin) if offloads else OffloadPolicy()
    ranks = mesh["shard"].size()
    if comm_hooks.exchanges(ranks, compress) and stage >= 2 and policy.param_dtype == torch.bfloat16:
        # The exchange sums in fp32. Stages 0 and 1 accumulate in the precision of the reduction, which stays fp32.
        policy = replace(policy, reduce_dtype=torch.bfloat16)
    for unit in [*units(module), module]:
        # Backward starts with the root: released after forward, it would be gathered again at once.
        reshard = stage == 3 and unit is not module
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload_policy)
        comm_hooks.install(unit, replicate=replicate, ranks=ranks, compress=compress)
    for group in _groups_of(module):
        group.parameter_usage = ParameterUsage(group)


class ParameterUsage:
    """The parameters of one FSDP group that had a gradient since `reset`, and those whose gradient became zeros.

    Some parameters have no gradient on some ranks, such as the experts that no token of a rank was routed to. FSDP2
    reduces the gradients that exist. Ranks with different gradients would wait for each other or sum gradients of
    different parameters. A unit used only in the last micro-batch would have gradients in two precisions. Therefore
    zeros replace missing gradients in each reduction. At the step, the ranks find the parameters that none of them
    used (`unused_on_all_ranks`): these have no gradient, as on one rank. Not supported: a unit whose forward only some
    ranks run. Uses private names of FSDP2, which are the same from torch 2.11 to 2.13.
    """

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


def unused_on_all_ranks(module: nn.Module) -> set[str]:
    """Return the names of the parameters that no rank used in this step. Their gradients are zeros.

    Every rank calls, once per step.
    """
    groups = _groups_of(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()} if groups else {}
    used, unused = set[str](), set[str]()
    for group in groups:
        used.update(names[id(shard)] for shard in group.parameter_usage.used())
        unused.update(names[id(shard)] for shard in group.parameter_usage.unused())
        group.parameter_usage.reset()
    if not groups or dist.max_over_ranks(float(len(unused))) == 0.0:
        return set()
    return unused.difference(*dist.gather_objects(used))


def before_micro_batch(module: nn.Module, *, stage: int, last: bool) -> None:
    """Set whether the next backward reduces gradients and releases parameters."""
    copies = single_rank.compute_copies(module)
    if copies is not None:
        copies.gather()
        return
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(last or stage >= 2)
    module.set_reshard_after_backward(last or stage == 3)


def after_micro_batch(module: nn.Module, *, last: bool) -> None:
    """Release the compute copies of one rank after the last backward. FSDP2 releases by itself."""
    copies = single_rank.compute_copies(module)
    if copies is not None and last:
        copies.release()


def release(module: nn.Module) -> None:
    """Release gathered parameters, so that the next use gathers the values of the last step."""
    copies = single_rank.compute_copies(module)
    if copies is not None:
        copies.release()
        return
    for unit in _fsdp_modules(module):
        unit.reshard()


def discard(module: nn.Module) -> None:
    """Reset a module in the middle of a pass to its state before the forward, without gradients.

    FSDP2 has no public function for this. Its callback at the end of a backward resets its state; it runs here with
    nothing to reduce. Uses private names, which are the same from torch 2.11 to 2.13.
    """
    copies = single_rank.compute_copies(module)
    if copies is not None:
        copies.discard()
        return
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(True)
    groups = _groups_of(module)
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            parameter.sharded_param.grad = None
        group._partial_reduce_output = None
        group.parameter_usage.reset()
    root = module._get_fsdp_state()
    root._state_ctx.iter_forward_root = None
    root._comm_ctx.all_gather_state = None
    if root._is_root:  # None before the first forward
        root._root_post_backward_final_callback()
    for group in groups:
        if not group.is_sharded:
            group._to_sharded()
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.to_sharded()  # also those that failed between gathering and use


def sharded(module: nn.Module) -> list[Tensor]:
    """Return the parameters as they are stored between uses, whether gathered now or not."""
    copies = single_rank.compute_copies(module)
    if copies is not None:
        return [*(copies.masters or module.parameters())]
    return [parameter.sharded_param for parameter in _parameters(module)]


def gathered(module: nn.Module) -> list[Tensor]:
    """Return the buffers of gathered parameters. Released buffers have no bytes."""
    copies = single_rank.compute_copies(module)
    if copies is not None:
        return list(copies.copies)
    buffers: list[Tensor] = []
    for parameter in _parameters(module):
        buffers += getattr(parameter, "all_gather_outputs", [])
        if hasattr(parameter, "_unsharded_param"):
            buffers.append(dtensors.local(parameter._unsharded_param.detach()))
    return buffers


def gradients(module: nn.Module) -> list[Tensor]:
    """Return all current gradients: reduced ones, and full ones that wait for their reduction."""
    if single_rank.compute_copies(module) is not None:
        return [parameter.grad for parameter in sharded(module) if parameter.grad is not None]
    found = []
    for parameter in _parameters(module):
        full = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
        each = (parameter.sharded_param.grad, full, parameter.unsharded_accumulated_grad)
        found += [dtensors.local(gradient) for gradient in each if gradient is not None]
    return found


def _parameters(module: nn.Module) -> list[Any]:
    return [parameter for group in _groups_of(module) for parameter in group.fsdp_params]


def _groups_of(module: nn.Module) -> list[Any]:
    return [group for unit in _fsdp_modules(module) for group in _groups(unit._get_fsdp_state())]


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP state: a list since torch 2.12, one or None before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def _fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield child
