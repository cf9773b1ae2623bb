"""Laying a module out: its precision, its split over tensor groups, its shards, and the memory they live in."""

from functools import partial

import torch
from torch import Tensor, nn
from torch import _dynamo as dynamo
from torch.utils.checkpoint import checkpoint

from engine import optim, precision
from engine.config import EngineConfig, OptimizerConfig
from engine.kernels.wide_linear import widen_linears
from engine.offload import NvmeParameters
from engine.parallel import dist, head, operators, tensor, zero
from engine.parallel.pipeline_split import split_model

WAYS = 64
"""How often a block is compiled, at most. All of a model's share their code, and each way to call one is another: with
gradients and without, with dropout, rows of a size, packed or padded. PyTorch's own limit of 8 is soon reached.
"""


def lay_out(module: nn.Module, config: EngineConfig, optimizer: OptimizerConfig | None) -> NvmeParameters | None:
    """Cast, split, shard and allocate, in place; returns the files that shards live in, where they do.

    Parameters are fp32 masters where they are trained and not offloaded (nor asked for in bf16), else in compute
    precision. Meta parameters get memory and no values. Raises ValueError for a layout that can't be.
    """
    if optimizer is not None:
        require_together(config, optimizer)
    trains, elsewhere = optimizer is not None, offloads(config, optimizer)
    apart = optimizer is not None and optim.averages_itself(optimizer)
    if not trains or elsewhere or config.states == "bf16":
        _cast_parameters(module, precision.TORCH_DTYPE[config.dtype])
    else:
        _widen_parameters(module, everything=config.dtype == "fp32")
    _split(module, config)
    if config.dtype == "fp32" and dist.world().device.type == "cpu":
        widen_linears(module)
    if config.activation_checkpointing and trains:
        for block in zero.blocks(module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    if config.compile_blocks:
        operators.define()
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, WAYS)
        for block in zero.blocks(module):
            block.compile()
    on_host = config.offload_parameters != "none"
    whole_here = dist.world().zero_size * dist.world().tensor == 1
    alone = whole_here and config.states == "fp32" and not (on_host or elsewhere or apart)
    device = torch.device("cpu") if on_host else dist.world().device
    on_meta = any(p.is_meta for p in module.parameters())
    if not on_meta:
        module.to(device)
    zero.shard(
        module,
        stage=config.zero_stage,
        policy=precision.policy(config.dtype, config.reduce_dtype) if trains else precision.policy("fp32"),
        offload=on_host,
        pin=config.offload_parameters == "cpu",
        ranks=config.shard_ranks,
        compress=config.compress,
        apart=apart,
        alone=alone,
    )
    if config.offload_parameters == "nvme":
        return NvmeParameters(module, config.nvme_path)
    if on_meta:
        _materialize(module, device)
    return None


def require_together(config: EngineConfig, optimizer: OptimizerConfig) -> None:
    """Raises ValueError for a layout that can't train, or not with this optimizer."""
    if config.offload_parameters == "nvme" and config.offload_optimizer == "none":
        raise ValueError("offload_parameters=nvme needs offload_optimizer=cpu or nvme for what is trained")
    if config.states == "bf16" and optimizer.name.lower() != "adamw":
        raise ValueError(f"states=bf16 is for adamw; {optimizer.name} needs states=fp32")
    split = config.tensor_parallel * config.pipeline_parallel > 1
    if optim.averages_itself(optimizer) and (config.zero_stage or config.offload_optimizer != "none" or split):
        raise ValueError(f"{optimizer.name} wants whole parameters: zero_stage=0, no offload, no split model")


def offloads(config: EngineConfig, optimizer: OptimizerConfig | None) -> bool:
    """Whether the optimizer has a tier of its own; else masters and moments are where the shards are."""
    return optimizer is not None and config.offload_optimizer != "none"


def rests(config: EngineConfig, optimizer: OptimizerConfig | None) -> dict[str, str]:
    """Where states lie between uses that are not on the device: {owner: "host" or "nvme"}."""
    if config.offload_parameters == "none":
        return {}
    place = "host" if config.offload_parameters == "cpu" else "nvme"
    with_shards = ("parameters",) if offloads(config, optimizer) else ("parameters", "optimizer", "gradients")
    return dict.fromkeys(with_shards, place)


def _split(module: nn.Module, config: EngineConfig) -> None:
    """Over the ranks of a tensor group, as the plan says, or of a pipeline; sequence groups split no parameters."""
    world = dist.arrange(
        tensor=config.tensor_parallel, pipeline=config.pipeline_parallel, sequence=config.sequence_parallel
    )
    if config.pipeline_parallel > 1:
        dtype = precision.TORCH_DTYPE[config.dtype]
        split_model(module, rank=world.pipeline_rank, size=world.pipeline, dtype=dtype, device=world.device)
    if config.tensor_parallel > 1:
        mesh = zero.layout(stage=config.zero_stage, ranks=config.shard_ranks)["tensor"]
        tensor.parallelize(module, config.tensor_plan or tensor.plan_of(module), mesh)
        head.split_head(module, mesh)


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: buffers stay as they are where a module is trained, and rotary frequencies need their fp32."""
    module._apply(lambda t: t.to(dtype) if isinstance(t, nn.Parameter) and t.is_floating_point() else t)


def _widen_parameters(module: nn.Module, *, everything: bool) -> None:
    """Make fp32 masters of parameters that came in 16 bits: of those that are trained, or of all."""

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        short = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.itemsize < 4
        return tensor.float() if short and (everything or tensor.requires_grad) else tensor

    module._apply(widened)


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on `device`, and bring real buffers to where the module computes.

    `_apply` rather than `to_empty`: that one would empty the buffers too, and nothing could fill them again.
    """
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, f"buffer {name} has no values"
    computes = dist.world().device
    places = [(owner, name) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
    first = {id(owner._parameters[name]): (owner, name) for owner, name in reversed(places)}
    tied = [(owner, name, *first[id(owner._parameters[name])]) for owner, name in places]

    def placed(t: Tensor) -> Tensor:
        if t.is_meta:
            return torch.empty_like(t, device=device)
        return t.to(device if isinstance(t, nn.Parameter) else computes)  # a tied parameter comes by twice

    module._apply(placed)
    for owner, name, theirs, as_name in tied:  # a plain module's ties are cut by that
        owner._parameters[name] = theirs._parameters[as_name]
