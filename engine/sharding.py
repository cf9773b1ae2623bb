"""Apply a layout to a module: its precision, tensor and pipeline parallelism, ZeRO shards, and their memory."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from engine import optim
from engine.config import TORCH_DTYPE, EngineConfig, OptimizerConfig, Precision
from engine.host_memory import pinned
from engine.internals import allow_compilations, has_hooks
from engine.kernels.products import widen_linears
from engine.loading import copy_local
from engine.parallel import collectives, dist, dtensors, meshes, tensor, zero

if TYPE_CHECKING:
    from engine.offload import NvmeParameters, OffloadedOptimizer

MAX_COMPILED_VARIANTS = 64
"""The limit of compilations of a block. The blocks of a model share their code, and gradients, dropout, padding and row
lengths each need another variant. PyTorch's limit of 8 is too low for that.
"""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def apply(module: nn.Module, config: EngineConfig, optimizer: OptimizerConfig | None) -> "NvmeParameters | None":
    """Cast, split, shard and allocate a module, in place. Return the files of its shards if they are on NVMe.

    Trained parameters are fp32 masters, except with an offloaded optimizer (which has the masters) or `states="bf16"`.
    All others are in compute precision, also the frozen parameters under adapters. Meta parameters get memory, but no
    values; all others, and buffers, get those of rank 0. Raises ValueError for a layout that is not possible.
    """
    _broadcast_values(module)
    is_trained, has_tier = optimizer is not None, uses_offload(config, optimizer)
    if optimizer is not None:
        check_optimizer(config, optimizer)
    has_masters = is_trained and not has_tier and config.states == "fp32"
    _cast_parameters(module, TORCH_DTYPE[config.dtype], has_masters=has_masters)
    _split(module, config)
    if config.dtype == "fp32" and dist.world().device.type == "cpu":
        widen_linears(module)
    if config.compile_blocks:
        allow_compilations(MAX_COMPILED_VARIANTS)
        for block in zero.blocks(module):  # before `checkpoint`, inside of which nothing is compiled from outside
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    if config.activation_checkpointing and is_trained:
        for block in zero.blocks(module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    offloads_parameters = config.offload_parameters != "none"
    device = torch.device("cpu") if offloads_parameters else dist.world().device
    is_on_meta = any(p.is_meta for p in module.parameters())
    if not is_on_meta:  # FSDP2 moves the shards to the host, but not the slices of tensor parallelism to a GPU
        module.to(device if dist.world().tensor == 1 else dist.world().device)
    local_gradients = optimizer is not None and optim.averages_itself(optimizer)
    policy = precision_policy(config.dtype, config.reduce_dtype)
    is_plain = config.states == "fp32" and not (offloads_parameters or has_tier or local_gradients)
    communicates = dist.world().zero_size > 1 and (is_trained or config.zero_stage > 0)
    if is_plain and not communicates and dist.world().tensor == 1:
        zero.ComputeCopies(module, policy.param_dtype)
    else:
        zero.shard(module, config, policy, local_gradients=local_gradients)
    if config.offload_parameters == "nvme":
        from engine.offload import NvmeParameters

        return NvmeParameters(module, config.nvme_path)
    if is_on_meta:
        _allocate(module, device)
    return None


def check_parameters(module: nn.Module, *, has_fill: bool) -> None:
    """Raise ValueError for a parameter that would get no values, or whose hooks would not run."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta and not has_fill:
            raise ValueError(f"{name} has no values, because it is on the meta device. Pass initialize(..., fill=...)")
        if has_hooks(parameter):
            raise ValueError(
                f"{name} has a gradient hook, which would not run: the engine trains shards or copies of parameters. "
                "Remove the hook, and change the gradient in a torch.autograd.Function of the forward"
            )


def _broadcast_values(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0: each rank may have drawn random values of its own."""
    for value in (*module.parameters(), *module.buffers()) if dist.world().size > 1 else ():
        if not value.is_meta:
            values = value.detach().to(dist.world().device).flatten()
            collectives.broadcast(values.view(torch.uint8), source=0)  # no backend sends all types
            values = values.view_as(value).to(value.device)
            if not torch.equal(values, value):  # an expanded buffer cannot be written
                value.detach().copy_(values)


def parameter_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module that have values, to initialize masters after the module was cast."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}


def precision_policy(dtype: Precision, reduce: Precision = "fp32") -> MixedPrecisionPolicy:
    """Return FSDP2's policy to compute in `dtype` and to reduce gradients in `reduce`. Masters are fp32."""
    if dtype == reduce == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=TORCH_DTYPE[dtype], reduce_dtype=TORCH_DTYPE[reduce])


def check_optimizer(config: EngineConfig, optimizer: OptimizerConfig) -> None:
    """Raise ValueError if a module with this layout cannot be trained with this optimizer."""
    if config.offload_parameters == "nvme" and config.offload_optimizer == "none":
        raise ValueError(
            "offload_parameters=nvme needs offload_optimizer=cpu or nvme, because fp32 masters would stay on the device"
        )
    if config.states == "bf16" and optimizer.name.lower() != "adamw":
        raise ValueError(f"states=bf16 supports only the optimizer adamw, not {optimizer.name}. Set states=fp32")
    splits = config.tensor_parallel * config.pipeline_parallel > 1
    if optim.averages_itself(optimizer) and (config.zero_stage or config.offload_optimizer != "none" or splits):
        raise ValueError(
            f"the optimizer {optimizer.name} needs full parameters on every rank. Set zero_stage=0, "
            "offload_optimizer=none, tensor_parallel=1 and pipeline_parallel=1"
        )


def fill(
    module: nn.Module,
    optimizer: "torch.optim.Optimizer | OffloadedOptimizer | None",
    values: dict[str, Tensor],
    initialize: Callable[[nn.Module], None] | None,
) -> None:
    """Give parameters the full tensors in `values`, which are removed, then call `initialize(module)`.

    The masters of an offloaded optimizer get the values in full precision. Every rank calls. If `initialize` raises an
    OSError or a ValueError on one rank, as for a damaged slice of a file, every rank raises it.
    """
    for name, parameter in module.named_parameters():
        if name in values:
            copy_local(parameter, values.pop(name))
    if initialize is not None:
        problem: OSError | ValueError | None = None
        try:
            initialize(module)
        except (OSError, ValueError) as error:
            problem = error
        for other in dist.gather_objects(problem):
            if other is not None:
                raise problem or other
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)):
        optimizer.update_masters()


def uses_offload(config: EngineConfig, optimizer: OptimizerConfig | None) -> bool:
    """Return whether the optimizer states are offloaded. Otherwise masters and moments are next to the shards."""
    return optimizer is not None and config.offload_optimizer != "none"


def offloaded_owners(config: EngineConfig, optimizer: OptimizerConfig | None) -> dict[str, str]:
    """Return where the memory of each owner is between uses, if not on the device: "host" or "nvme"."""
    if config.offload_parameters == "none":
        return {}
    owners = ("parameters",) if uses_offload(config, optimizer) else ("parameters", "optimizer", "gradients")
    return dict.fromkeys(owners, "host" if config.offload_parameters == "cpu" else "nvme")


def _split(module: nn.Module, config: EngineConfig) -> None:
    """Apply tensor or pipeline parallelism. Sequence parallelism splits no parameters."""
    world = dist.set_parallelism(
        tensor=config.tensor_parallel, pipeline=config.pipeline_parallel, sequence=config.sequence_parallel
    )
    if config.sequence_parallel > 1:
        meshes.sequence_group()  # made now: in the middle of a pass, other collectives may be in flight
    if config.pipeline_parallel > 1:
        from engine.parallel.pipeline_split import split_model

        dtype = TORCH_DTYPE[config.dtype]
        split_model(module, rank=world.pipeline_rank, size=world.pipeline, dtype=dtype, device=world.device)
    if config.tensor_parallel > 1:
        mesh = meshes.zero_mesh(stage=config.zero_stage, shard_ranks=config.shard_ranks)["tensor"]
        tensor.parallelize(module, config.tensor_plan or tensor.plan_of(module), mesh)
        tensor.split_head(module, mesh)


def _cast_parameters(module: nn.Module, dtype: torch.dtype, *, has_masters: bool) -> None:
    """Cast parameters to `dtype`, except trained ones with masters: these to fp32.

    Buffers need their own precision.
    """

    def cast(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter) or not t.is_floating_point():
            return t
        return t.float() if has_masters and t.requires_grad else t.to(dtype)

    module._apply(cast)
    for norm in module.modules():
        if isinstance(norm, BATCH_NORMS):  # their kernels need statistics in the precision of the weight
            norm._buffers.update(
                {name: b.to(dtype) for name, b in norm.named_buffers(recurse=False) if b.is_floating_point()}
            )


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on `device`, and move buffers to the device that computes.

    `to_empty` would also clear the buffers. Tied parameters stay tied.
    """
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, f"buffer {name} has no values"
    names = zero.parameter_names(module).values()
    compute_device = dist.world().device

    def allocated(t: Tensor) -> Tensor:
        if not t.is_meta:
            return t.to(device if isinstance(t, nn.Parameter) else compute_device)  # a tied parameter comes twice
        memory = torch.empty_like(t, device=device)
        local = dtensors.local(memory)
        if local.numel() and device.type != compute_device.type:  # FSDP2 would pin shards in PyTorch's own memory
            storage = pinned(local.numel(), local.dtype).untyped_storage()
            local.set_(storage, 0, local.shape, local.stride())
        return memory

    module._apply(allocated)
    for first, *others in names:  # `_apply` separates the ties of plain modules
        zero.assign_parameter(module, others, module.get_parameter(first))
