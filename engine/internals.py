"""Every private interface of PyTorch, transformers and vLLM that the engine uses: most of them behind a function.

A new version of a library may change these names without notice. `python -m tests.versions` runs the tests of this
module with the oldest and the newest version that pyproject.toml allows. The tables that `nn.Module` documents for its
subclasses (`_parameters`, `_buffers`, `_modules`, `_apply`) and `torch._foreach_*` count as public: they are as old as
the public interface.

FSDP2 accumulates gradients in `unsharded_accumulated_grad` up to torch 2.14, and in the gradient of the gathered
parameter since 2.15, where `unsharded_accumulated_grad` is a property that returns this gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed import ProcessGroup, _functional_collectives, distributed_c10d, get_backend
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

functional_collectives = _functional_collectives  # torch.compile traces them


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the collectives of a group of this rank. Other backends than NCCL and Gloo have none."""
    if get_backend(group) in ("nccl", "gloo"):
        getattr(distributed_c10d, "set_timeout", distributed_c10d._set_pg_timeout)(timeout, group)  # public since 2.15


def interleaved_shard(dim: int, matrices: int) -> Placement:
    """Return the placement of tensors that concatenate a shard of each of `matrices` matrices along `dim`."""
    return _StridedShard(dim, split_factor=matrices)


def has_hooks(parameter: Tensor) -> bool:
    """Return whether hooks read or change the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def allow_compilations(number: int) -> None:
    """Raise the number of times that `torch.compile` compiles one function for different inputs."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, number)


def omit_shutdown_at_exit(engine: Any) -> None:
    """Omit the shutdown of a vLLM engine when the process ends: it would leave groups that no longer exist."""
    engine.engine_core._finalizer.atexit = False


def clear_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, one for each stream. The next product on a stream allocates another.

    A workspace that was allocated in a capture returns to the memory pool of the graph.
    """
    torch._C._cuda_clearCublasWorkspaces()


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors with the same storage share. `data_ptr` is 0 on the meta device."""
    return tensor.untyped_storage()._cdata


def attention_name(model: Any) -> str:
    """Return the name of the attention function of a transformers model."""
    name: str = model.config._attn_implementation
    return name


def inputs_of_next_step(model: Any, outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the next step of a decoding method of `generate`; `outputs` are those of this step."""
    extended: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, inputs)
    return extended


def tensor_parallel_plan(module: nn.Module) -> Mapping[str, str]:
    """Return the tensor-parallel plan of a transformers model; empty if it has none."""
    return dict(getattr(module, "_tp_plan", None) or {})


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can pack the weight of a linear layer in this precision on this machine."""
    ops: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(ops._is_mkldnn_bf16_supported())


def pack_linear(weight: Tensor, rows: int) -> tuple[Callable[..., Tensor], Tensor]:
    """Return (product, packed weight) for inputs of about `rows` rows; weight: (out, in).

    `product(x, packed, bias, "none", [], "")` returns x @ weight.T + bias.
    """
    ops: Any = torch.ops.mkldnn
    return ops._linear_pointwise, ops._reorder_linear_weight(weight.contiguous(), rows)


def fill_missing_gradients(module: nn.Module) -> None:
    """Let each FSDP group reduce zeros for parameters without a gradient, and record the others (`take_used`).

    Some parameters have no gradient on some ranks, such as the experts that no token of a rank was routed to. FSDP2
    reduces the gradients that exist. Ranks with different gradients would wait for each other or sum gradients of
    different parameters. A unit used only in the last micro-batch would have gradients in two precisions. Not
    supported: a unit whose forward only some ranks run.
    """
    for group in _groups(module):
        group.used = {}
        group.post_backward = partial(_fill_and_post_backward, group, group.post_backward)


def _fill_and_post_backward(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    """Give all gathered parameters a gradient in one precision, before a reduction."""
    gathered = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")] if group.reduce_grads else []
    trained = [p for p in gathered if p._unsharded_param.requires_grad]
    accumulates = any(p.unsharded_accumulated_grad is not None for p in trained)
    with torch.no_grad():
        for parameter in trained:
            full = parameter._unsharded_param
            if not full.numel():  # FSDP2 cannot reduce empty gradients
                _drop_full_gradients(parameter)
                continue
            if parameter.unsharded_accumulated_grad is None and full.grad is None:
                full.grad = torch.zeros_like(full, dtype=full.grad_dtype)
            else:
                group.used[id(parameter)] = parameter
            if accumulates and parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = full.grad.to(parameter.reduce_dtype)
                full.grad = None
    post_backward(*args)
    reduced, group._all_reduce_state = group._all_reduce_state, None
    if reduced is not None and reduced.all_reduce_input.is_cuda:
        # FSDP2 would hold the all-reduced buffers of all units until backward ends, because the stream that reduces may
        # reuse a free one while the stream that all-reduces reads it.
        reduced.all_reduce_input.record_stream(group.comm_ctx.all_reduce_stream)


def take_used(module: nn.Module) -> list[Tensor]:
    """Return the shards of the parameters that had a gradient since the last call."""
    used = [parameter.sharded_param for group in _groups(module) for parameter in group.used.values()]
    for group in _groups(module):
        group.used.clear()
    return used


def take_gradients(module: nn.Module, takers: Mapping[int, Callable[[Tensor], None]]) -> None:
    """Pass this rank's part of each reduced gradient to the function for its shard (by `id`); `grad` stays None.

    FSDP2 copies the gradient of a shard on the host there first. For a hook on the shard, this copy is pageable, and
    the host waits for it. Here the gradient is still on the device, in the stream that reduces.
    """
    for group in _groups(module):
        group.post_backward = partial(_give_gradients, group, group.post_backward, takers)


def _give_gradients(
    group: Any, post_backward: Callable[..., None], takers: Mapping[int, Callable[[Tensor], None]], *args: Any
) -> None:
    taken = [(p, takers[id(p.sharded_param)]) for p in group.fsdp_params if id(p.sharded_param) in takers]
    for parameter, take in taken:
        parameter.offload_to_cpu, parameter.to_sharded_dtensor = False, take  # the result is assigned to `grad`
    try:
        post_backward(*args)
    finally:
        for parameter, _ in taken:
            parameter.offload_to_cpu = isinstance(group.offload_policy, CPUOffloadPolicy)
            del parameter.to_sharded_dtensor


def discard_pass(module: Any) -> None:
    """Reset a module in the middle of a pass to its state before the forward, without gradients.

    FSDP2 has no public function for this. Its callback at the end of a backward resets its state; it runs here with
    nothing to reduce.
    """
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(True)
    groups = _groups(module)
    for group in groups:
        for parameter in group.fsdp_params:
            _drop_full_gradients(parameter)
            parameter.sharded_param.grad = None
        group._partial_reduce_output = None
        group.used.clear()
    root = module._get_fsdp_state()
    root._state_ctx.iter_forward_root = None
    root._comm_ctx.all_gather_state = None
    root._state_ctx.manual_backward_finalization_active = False  # torch 2.15 sets it when a backward starts
    if root._is_root:  # None before the first forward
        root._root_post_backward_final_callback()
    for group in groups:
        if not group.is_sharded:
            group._to_sharded()
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.to_sharded()  # also those that failed between gathering and use


def fsdp_shards(module: nn.Module) -> list[Tensor]:
    """Return the shards of the parameters, whether they are gathered now or not."""
    return [parameter.sharded_param for parameter in _parameters(module)]


def fsdp_gathered(module: nn.Module) -> list[Tensor]:
    """Return the buffers of gathered parameters. Released buffers have no bytes."""
    buffers: list[Tensor] = []
    for parameter in _parameters(module):
        buffers += getattr(parameter, "all_gather_outputs", [])
        if hasattr(parameter, "_unsharded_param"):
            buffers.append(parameter._unsharded_param)
    return buffers


def fsdp_gradients(module: nn.Module) -> list[Tensor]:
    """Return all current gradients: reduced ones, and full ones that wait for their reduction."""
    found = []
    for parameter in _parameters(module):
        full = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
        each = {id(g): g for g in (parameter.sharded_param.grad, full, parameter.unsharded_accumulated_grad)}
        found += [gradient for gradient in each.values() if gradient is not None]
    return found


def _drop_full_gradients(parameter: Any) -> None:
    if "unsharded_accumulated_grad" in vars(parameter):
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _parameters(module: nn.Module) -> Iterator[Any]:
    return (parameter for group in _groups(module) for parameter in group.fsdp_params)


def _groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups of all FSDP units: a list per unit since torch 2.12, one or None before."""
    groups: list[Any] = []
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)
            groups += found if found is not None else [g for g in (state._fsdp_param_group,) if g is not None]
    return groups
