"""ZeRO stages 0 to 3 as four settings of FSDP2 (`torch.distributed.fsdp.fully_shard`).

Stage 0 replicates on a mesh (W, 1); stages 1 to 3 shard on a mesh (1, W) and differ in how long gathered parameters and
whole gradients live. FSDP2 always keeps optimizer states with the shard.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from engine.config import Compress
from engine.parallel import comm_hooks, dist, dtensors, single_rank, unused_parameters


def units(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a module, each one FSDP unit: the elements of its outermost ModuleLists, each once.

    One that shares a parameter with what is outside of it is none: its parameters come with the root's.
    """
    owners = Counter(id(p) for child in module.modules() for p in child._parameters.values())

    def closed(block: nn.Module) -> bool:
        inside = Counter(id(p) for child in block.modules() for p in child._parameters.values() if p is not None)
        return bool(inside) and all(owners[parameter] == count for parameter, count in inside.items())

    return [block for block in blocks(module) if closed(block)]


def blocks(module: nn.Module) -> list[nn.Module]:
    """The elements of a module's outermost ModuleLists that have parameters, in order, each once; of a container in
    such a list its own.
    """
    found: dict[nn.Module, None] = {}
    for child in module.children():
        inner = _elements(child) if isinstance(child, nn.ModuleList) else blocks(child)
        found.update(dict.fromkeys(inner))
    return list(found)


def _elements(container: nn.Module) -> Iterator[nn.Module]:
    for element in container.children():
        if type(element).forward is nn.Module.forward:  # a list or a dictionary, which nobody calls
            yield from _elements(element)
        elif any(True for _ in element.parameters()):
            yield element


def layout(*, stage: int, ranks: int | None = None) -> DeviceMesh:
    """The mesh of a stage. `ranks` neighbours (a tensor group is one) share a copy from stage 1 on, all by default.

    Raises ValueError where the world does not divide by it.
    """
    size = dist.world().zero_size
    together = 1 if stage == 0 else ranks or size
    if size % together:
        raise ValueError(f"shard_ranks={together} does not divide the {size} ranks")
    return dist.mesh(replicate=size // together, shard=together)


def shard(
    module: nn.Module,
    *,
    stage: int,
    policy: MixedPrecisionPolicy,
    offload: bool,
    pin: bool = True,
    ranks: int | None = None,
    compress: Compress = "none",
    apart: bool = False,
    alone: bool = False,
) -> None:
    """Lay a module out over the ranks, in place. Its parameters become DTensors on `layout`'s mesh.

    `offload` says that the shards live on the host, `pin` that they are pinned there.
    `apart` (stage 0) leaves every rank its own gradients: nothing is reduced. With `alone` there is one rank, and
    parameters stay plain tensors (engine/parallel/single_rank.py).
    """
    if alone:
        single_rank.attach(module, policy)
        return
    whole = layout(stage=stage, ranks=ranks)
    replicate = 1 if apart else whole["replicate"].size()
    # Where nothing is replicated FSDP2 is told so: else it holds all reduced fp32 gradients until backward ends.
    mesh = whole[("shard",) if replicate == 1 else ("replicate", "shard")]
    on_host = dist.world().device.type == "cpu"  # where there is no other place to bring them to
    where = CPUOffloadPolicy(pin_memory=pin) if offload and not on_host else OffloadPolicy()
    sending = comm_hooks.Sending(replicate=replicate, shard=mesh["shard"].size(), compress=compress)
    policy = comm_hooks.reducing(policy, sending, each_micro_batch=stage >= 2)
    for part in [*units(module), module]:
        # Backward begins with the root: released after forward it would be gathered again at once.
        reshard = stage == 3 and part is not module
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=where)
        comm_hooks.install(part, sending)
    for group in _groups_of(module):
        unused_parameters.watch(group)


def without_gradient(module: nn.Module) -> set[str]:
    """Names of the parameters that no rank's backward reached in this step; each of them has zeros as its gradient.

    Every rank calls, once a step.
    """
    groups = _groups_of(module)
    return unused_parameters.by_no_rank(module, map(unused_parameters.usage_of, groups)) if groups else set()


def before_micro_batch(module: nn.Module, *, stage: int, last: bool) -> None:
    """Set what the coming backward does: keep or reduce gradients, keep or release parameters."""
    stand_ins = single_rank.of(module)
    if stand_ins is not None:
        stand_ins.gather()
        return
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(last or stage >= 2)
    module.set_reshard_after_backward(last or stage == 3)


def after_micro_batch(module: nn.Module, *, last: bool) -> None:
    """What FSDP2 does by itself at the end of a backward."""
    stand_ins = single_rank.of(module)
    if stand_ins is not None and last:
        stand_ins.release()


def release(module: nn.Module) -> None:
    """Drop gathered parameters, so that the next use gathers what the optimizer wrote meanwhile."""
    stand_ins = single_rank.of(module)
    if stand_ins is not None:
        stand_ins.release()
        return
    for unit in _fsdp_modules(module):
        unit.reshard()


def discard(module: nn.Module) -> None:
    """Forget a pass that was left half done, with all its gradients: the module is as before its forward.

    FSDP2 has no public way back from the middle of a pass. What ends a backward there puts everything to rest, so that
    is called, with reducing off and nothing to reduce. Private names, the same from torch 2.11 to 2.13.
    """
    stand_ins = single_rank.of(module)
    if stand_ins is not None:
        stand_ins.discard()
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
    for group in groups:
        unused_parameters.usage_of(group).forget()
    root = module._get_fsdp_state()
    root._state_ctx.iter_forward_root = None
    root._comm_ctx.all_gather_state = None
    if root._is_root:  # None before its first forward
        root._root_post_backward_final_callback()
    for group in groups:
        if not group.is_sharded:
            group._to_sharded()
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.to_sharded()  # one that failed between gathering and use is not known to its group


def sharded(module: nn.Module) -> list[Tensor]:
    """The parameters as they are kept between uses, gathered now or not."""
    stand_ins = single_rank.of(module)
    if stand_ins is not None:
        return [*(stand_ins.masters or module.parameters())]
    return [parameter.sharded_param for parameter in _parameters(module)]


def gathered(module: nn.Module) -> list[Tensor]:
    """The buffers of whole parameters that are allocated now; those that were released have no bytes."""
    stand_ins = single_rank.of(module)
    if stand_ins is not None:
        return list(stand_ins.copies)
    found: list[Tensor] = []
    for parameter in _parameters(module):
        found += getattr(parameter, "all_gather_outputs", [])
        if hasattr(parameter, "_unsharded_param"):
            found.append(dtensors.local(parameter._unsharded_param.detach()))
    return found


def gradients(module: nn.Module) -> list[Tensor]:
    """Gradients that are held now: reduced ones, and whole ones that wait for their reduction."""
    if single_rank.of(module) is not None:
        return [parameter.grad for parameter in sharded(module) if parameter.grad is not None]
    found = []
    for parameter in _parameters(module):
        whole = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
        held = (parameter.sharded_param.grad, whole, parameter.unsharded_accumulated_grad)
        found += [dtensors.local(gradient) for gradient in held if gradient is not None]
    return found


def _parameters(module: nn.Module) -> list[Any]:
    return [parameter for group in _groups_of(module) for parameter in group.fsdp_params]


def _groups_of(module: nn.Module) -> list[Any]:
    return [group for unit in _fsdp_modules(module) for group in _groups(unit._get_fsdp_state())]


def _groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP state: a list since torch 2.12, one or None before."""
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found) if found is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def _fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield child
