"""Tensor parallelism: the matrices of a block split over the ranks of a tensor group (Shoeybi et al., 2019,
arXiv:1909.08053), by a plan that says for each module name how.

transformers ships a plan with most families (`layers.*.self_attn.q_proj: colwise`). The parameters become DTensors on
the mesh's `tensor` dimension, which FSDP2 then shards over the others; forwards work on the local parts, with a
collective (`regions`) only where a part has to become whole. All ranks of a group see the same batch.

A language model's head is split by engine/parallel/head.py, whatever the plan says of it. Norms, biases that are added
to whole outputs, and embeddings that are not tied to the head stay whole on every rank. Left out: splitting the
sequence, attention that compresses keys (MLA).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from engine.parallel import autograd_collectives, dtensors

HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads")
WITH_PLAN = "Llama, Qwen, Mistral, Mixtral, Gemma, Phi, OLMo, GPT-NeoX and Starcoder 2 have one"


def plan_of(module: nn.Module) -> Mapping[str, str]:
    """The plan that came with the outermost submodule that has one. Raises ValueError where there is none."""
    for child in module.modules():
        plan = getattr(child, "_tp_plan", None) or {}
        if any("*" in pattern for pattern in plan):  # one without blocks names the head alone
            return dict(plan)
    models = (type(child).__name__ for child in module.modules() if hasattr(child, "config"))
    raise ValueError(
        f"tensor_parallel: {next(models, type(module).__name__)} comes without a tensor-parallel plan "
        f"({WITH_PLAN}); give it one ({{PATTERN: STYLE}}; train.py takes model.tensor_plan), or take tensor_parallel=1 "
        "and ZeRO stage 3"
    )


def parallelize(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split a module, in place, over the one-dimensional `mesh`. Before it is sharded by FSDP2.

    A pattern names modules, or parameters of a module of experts, by the end of their path; `*` stands for a number.
    Raises ValueError for a style or a shape that can't be split.
    """
    inside = {pattern: style for pattern, style in plan.items() if "*" in pattern}
    modules = list(module.named_modules())
    applied = 0
    for path, child in modules:
        style = style_of(path, inside)
        if style is not None:
            _check_heads(module.get_submodule(path.rpartition(".")[0]), style, mesh.size())
            _apply(path, child, style, inside, mesh)
            applied += 1
    if not applied:
        raise ValueError(f"tensor_parallel: no module is called like {next(iter(inside), 'what the plan names')}")


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """What a plan says of the module or parameter at `path`."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", path)
    return next((style for pattern, style in plan.items() if f".{generic}".endswith(f".{pattern}")), None)


def _apply(path: str, child: nn.Module, style: str, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    if style == "moe_tp_experts":
        _experts(path, child, plan, mesh)
    elif style in WHOLE:
        WHOLE[style](child, mesh)
    elif style in LINEAR:
        _linear(path, child, style, mesh)
    else:
        known = ", ".join(sorted([*LINEAR, *WHOLE, "moe_tp_experts"]))
        raise ValueError(f"tensor_parallel: {path} is planned {style}, which is not known here; known are {known}")


def _linear(path: str, child: nn.Module, style: str, mesh: DeviceMesh) -> None:
    by_column = style in COLUMNS
    if hasattr(child, "base_layer"):  # a LoRA layer: the side of the adapter that meets the split is split with it
        adapters = child.lora_B if by_column else child.lora_A
        parts = [child.base_layer, *adapters.children()]  # type: ignore[union-attr]
    else:
        parts = [child]
    for part in parts:
        if not isinstance(part, nn.Linear):
            raise ValueError(f"tensor_parallel: {path} is a {type(part).__name__}, and {style} splits linear layers")
        LINEAR[style](path, part, mesh)


def column_wise(path: str, layer: nn.Linear, mesh: DeviceMesh, *, gather: bool) -> None:
    """Split a linear layer by its outputs; `gather` puts them together again."""
    group = mesh.get_group()
    for leaf in ("weight", "bias"):
        _distribute(path, layer, leaf, 0, mesh)

    def forward(x: Tensor) -> Tensor:
        bias = None if layer.bias is None else dtensors.local(layer.bias)
        part = F.linear(autograd_collectives.copied(x, group), dtensors.local(layer.weight), bias)
        return autograd_collectives.gathered(part, group) if gather else part

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _row_wise(path: str, layer: nn.Linear, mesh: DeviceMesh, *, split: bool) -> None:
    group = mesh.get_group()
    _distribute(path, layer, "weight", 1, mesh)

    def forward(x: Tensor) -> Tensor:
        part = autograd_collectives.split(x, group) if split else x
        whole = autograd_collectives.summed(F.linear(part, dtensors.local(layer.weight)), group)
        return whole if layer.bias is None else whole + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _own_norm(module: nn.Module, mesh: DeviceMesh) -> None:
    """Whole parameters that work on each rank's own heads: their gradients are summed."""
    group, inner = mesh.get_group(), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with seen_as(module, lambda p: autograd_collectives.copied(p, group)):
            return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def _own_heads(module: nn.Module, mesh: DeviceMesh) -> None:
    """For attention that counts its heads instead of leaving the number open."""
    for name in HEAD_COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            setattr(module, name, _share(f"{type(module).__name__}.{name}", count, mesh.size()))


def _experts(path: str, module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Every rank computes a share of every expert's inner width: tokens need not travel."""
    if hasattr(module, "base_layer"):
        raise ValueError(
            f"tensor_parallel: {path} has an adapter, and adapters of experts are not split; name other modules for it "
            "(lora.targets), or shard by zero_stage=3 alone"
        )
    group, inner = mesh.get_group(), module.forward
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        style = style_of(f"{path}.{leaf}", plan)
        if style not in EXPERTS:
            raise ValueError(f"tensor_parallel: {path}.{leaf} is planned {style}; {', '.join(EXPERTS)} are known")
        dim, pieces = EXPERTS[style]
        _distribute(path, module, leaf, parameter.ndim + dim, mesh, pieces=pieces)

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden, weights = autograd_collectives.copied(hidden, group), autograd_collectives.copied(weights, group)
        with seen_as(module, dtensors.local):
            part = inner(hidden, indices, weights, *args, **kwargs)
        return autograd_collectives.summed(part, group)

    module.forward = forward  # type: ignore[method-assign]


LINEAR: dict[str, Callable[[str, nn.Linear, DeviceMesh], None]] = {
    "colwise": partial(column_wise, gather=False),
    "colwise_gather_output": partial(column_wise, gather=True),
    "colwise_rep": partial(column_wise, gather=True),
    "rowwise": partial(_row_wise, split=False),
    "rowwise_split_input": partial(_row_wise, split=True),
    "rowwise_rep": partial(_row_wise, split=True),
}
COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
WHOLE: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "replicated_with_grad_allreduce": _own_norm,
    "local_heads": _own_heads,  # ours, for plans given by hand
}
EXPERTS = {"packed_colwise": (-2, 2), "colwise": (-2, 1), "rowwise": (-1, 1)}
"""Of (experts, out, in): the dimension that is split, and of how many matrices side by side each gives a share."""


def _distribute(path: str, owner: nn.Module, leaf: str, dim: int, mesh: DeviceMesh, *, pieces: int = 1) -> None:
    """Make a parameter a DTensor that holds this rank's share of one dimension, in each of its `pieces`."""
    whole = owner._parameters[leaf]
    if whole is None:
        return
    share = _share(f"{path}.{leaf} (dimension {dim})", whole.shape[dim] // pieces, mesh.size())
    first = mesh.get_local_rank() * share
    parts = [part.narrow(dim, first, share) for part in whole.detach().chunk(pieces, dim)]
    placement = Shard(dim) if pieces == 1 else _interleaved(dim, pieces)
    split = DTensor.from_local(
        torch.cat(parts, dim), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    owner._parameters[leaf] = nn.Parameter(split, requires_grad=whole.requires_grad)


def _interleaved(dim: int, pieces: int) -> Placement:
    """Each rank has its share of every one of `pieces` equal parts: private in torch, the same from 2.11 to 2.13."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def _share(what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"tensor_parallel={ranks} does not divide {what}, {count}; choose a divisor of it")
    return count // ranks


def _check_heads(parent: nn.Module, style: str, ranks: int) -> None:
    """Where the columns are heads, whole ones go to each rank."""
    config = getattr(parent, "config", None)
    if style == "colwise" and config is not None and (hasattr(parent, "head_dim") or hasattr(parent, "head_size")):
        for key, what in HEADS.items():
            count = getattr(config, key, None)
            if isinstance(count, int):
                _share(f"the number of {what} ({key})", count, ranks)


@contextmanager
def seen_as(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block the module's own parameters are what `change` makes of them."""
    kept = dict(module._parameters)
    module._parameters.update({name: None if p is None else change(p) for name, p in kept.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(kept)
