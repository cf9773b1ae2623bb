"""Tensor parallelism: the matrices of a block split over the ranks of a tensor group.

Shoeybi et al., 2019, arXiv:1909.08053. A plan maps module name patterns to styles; transformers ships a plan with most
families (`layers.*.self_attn.q_proj: colwise`). The split parameters become DTensors on the mesh's `tensor` dimension,
and FSDP2 shards them over the other dimensions. Forwards compute with the local shards and call a collective
(`engine/parallel/collectives.py`) where they need full values. All ranks of a group get the same batch.

The head of a language model is split by rows of the vocabulary, independently of the plan: no rank has all logits.
Norms, biases that are added to full outputs, and embeddings that are not tied to the head are replicated. Not
supported: sequence splitting inside a tensor group, and attention with compressed keys (MLA).
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
from torch.nn import functional as F

from engine.internals import interleaved_shard, tensor_parallel_plan
from engine.parallel import collectives, dtensors

HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads")
WITH_PLAN = "Llama, Qwen, Mistral, Mixtral, Gemma, Phi, OLMo, GPT-NeoX and Starcoder 2 have one"


def plan_of(module: nn.Module) -> Mapping[str, str]:
    """Return the plan of the outermost submodule that has one. Raises ValueError if no submodule has one."""
    for child in module.modules():
        plan = tensor_parallel_plan(child)
        if any("*" in pattern for pattern in plan):  # a plan without blocks describes only the head
            return plan
    models = (type(child).__name__ for child in module.modules() if hasattr(child, "config"))
    raise ValueError(
        f"tensor_parallel: {next(models, type(module).__name__)} comes without a tensor-parallel plan "
        f"({WITH_PLAN}). Set tensor_plan to {{PATTERN: STYLE}}, or use tensor_parallel=1 and zero_stage=3"
    )


def parallelize(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split a module in place over the one-dimensional `mesh`, before FSDP2 shards it.

    A pattern matches the end of a module's path, or of the path of an experts module's parameter; `*` matches a number.
    Raises ValueError for an unknown style, and for a shape that the ranks do not divide.
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
        raise ValueError(f"tensor_parallel: no module matches tensor_plan ({next(iter(inside), 'which is empty')})")


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of the module or parameter at `path`; None if the plan has none."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", path)
    return next((style for pattern, style in plan.items() if f".{generic}".endswith(f".{pattern}")), None)


def _apply(path: str, child: nn.Module, style: str, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    if style == "moe_tp_experts":
        _experts(path, child, plan, mesh)
    elif style in MODULES:
        MODULES[style](child, mesh)
    elif style in LINEAR:
        _linear(path, child, style, mesh)
    else:
        known = ", ".join(sorted([*LINEAR, *MODULES, "moe_tp_experts"]))
        raise ValueError(
            f"tensor_parallel: tensor_plan has the unknown style {style} for {path}. Known styles are {known}"
        )


def _linear(path: str, child: nn.Module, style: str, mesh: DeviceMesh) -> None:
    by_column = style in COLUMNS
    if hasattr(child, "base_layer"):  # LoRA: split the matrix of the adapter that is next to the split dimension
        adapters = child.lora_B if by_column else child.lora_A
        layers = [child.base_layer, *adapters.children()]  # type: ignore[union-attr]
    else:
        layers = [child]
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"tensor_parallel: {path} is a {type(layer).__name__}, and {style} splits linear layers")
        LINEAR[style](path, layer, mesh)


def column_wise(path: str, layer: nn.Linear, mesh: DeviceMesh, *, gather: bool) -> None:
    """Split a linear layer by its outputs; `gather` makes its forward return all of them."""
    group = mesh.get_group()
    for leaf in ("weight", "bias"):
        _distribute(path, layer, leaf, 0, mesh)

    def forward(x: Tensor) -> Tensor:
        bias = None if layer.bias is None else dtensors.local(layer.bias)
        local = F.linear(collectives.copied(x, group), dtensors.local(layer.weight), bias)
        return collectives.gathered(local, group) if gather else local

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _row_wise(path: str, layer: nn.Linear, mesh: DeviceMesh, *, split: bool) -> None:
    group = mesh.get_group()
    _distribute(path, layer, "weight", 1, mesh)

    def forward(x: Tensor) -> Tensor:
        local = collectives.split(x, group) if split else x
        full = collectives.summed(F.linear(local, dtensors.local(layer.weight)), group)
        return full if layer.bias is None else full + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _replicated_norm(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of replicated parameters that each rank applies to its own heads."""
    group, inner = mesh.get_group(), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with replaced_parameters(module, lambda p: collectives.copied(p, group)):
            return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def _local_head_counts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the head counts of an attention module that stores them."""
    for name in HEAD_COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            setattr(module, name, _divide(f"{type(module).__name__}.{name}", count, mesh.size()))


def _experts(path: str, module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split the inner width of every expert, so that tokens stay on their rank."""
    if hasattr(module, "base_layer"):
        raise ValueError(
            f"tensor_parallel: {path} has an adapter, and adapters of experts cannot be split. Choose other target "
            "modules for the adapter, or use tensor_parallel=1 and zero_stage=3"
        )
    group, inner = mesh.get_group(), module.forward
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        style = style_of(f"{path}.{leaf}", plan)
        if style not in EXPERTS:
            raise ValueError(
                f"tensor_parallel: tensor_plan has the style {style} for {path}.{leaf}. Use one of {', '.join(EXPERTS)}"
            )
        dim, matrices = EXPERTS[style]
        _distribute(path, module, leaf, parameter.ndim + dim, mesh, matrices=matrices)

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden, weights = collectives.copied(hidden, group), collectives.copied(weights, group)
        with replaced_parameters(module, dtensors.local):
            local = inner(hidden, indices, weights, *args, **kwargs)
        return collectives.summed(local, group)

    module.forward = forward  # type: ignore[method-assign]


LINEAR: dict[str, Callable[[str, nn.Linear, DeviceMesh], None]] = {
    "colwise": partial(column_wise, gather=False),
    "colwise_gather_output": partial(column_wise, gather=True),
    "rowwise": partial(_row_wise, split=False),
    "rowwise_split_input": partial(_row_wise, split=True),
}
COLUMNS = ("colwise", "colwise_gather_output")
MODULES: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "replicated_with_grad_allreduce": _replicated_norm,
    "local_heads": _local_head_counts,  # our own style, for plans of users
}
EXPERTS = {"packed_colwise": (-2, 2), "colwise": (-2, 1), "rowwise": (-1, 1)}
"""Of (experts, out, in): the split dimension, and the number of matrices that are concatenated along it."""


def _distribute(path: str, owner: nn.Module, leaf: str, dim: int, mesh: DeviceMesh, *, matrices: int = 1) -> None:
    """Replace a parameter by a DTensor with this rank's shard of each of its `matrices`, concatenated along `dim`."""
    full = owner._parameters[leaf]
    if full is None:
        return
    size = _divide(f"{path}.{leaf} (dimension {dim})", full.shape[dim] // matrices, mesh.size())
    first = mesh.get_local_rank() * size
    shards = [matrix.narrow(dim, first, size) for matrix in full.detach().chunk(matrices, dim)]
    placement = Shard(dim) if matrices == 1 else interleaved_shard(dim, matrices)
    split = DTensor.from_local(
        torch.cat(shards, dim), mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
    )
    owner._parameters[leaf] = nn.Parameter(split, requires_grad=full.requires_grad)


def _divide(what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"tensor_parallel={ranks} does not divide {what}, {count}. Use a divisor of {count}")
    return count // ranks


def _check_heads(parent: nn.Module, style: str, ranks: int) -> None:
    """Check that each rank gets full attention heads if the columns are heads."""
    config = getattr(parent, "config", None)
    if style == "colwise" and config is not None and (hasattr(parent, "head_dim") or hasattr(parent, "head_size")):
        for key, what in HEADS.items():
            count = getattr(config, key, None)
            if isinstance(count, int):
                _divide(f"the number of {what} ({key})", count, ranks)


@contextmanager
def replaced_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside this context, the module's own parameters are the results of `change`."""
    original = dict(module._parameters)
    module._parameters.update({name: None if p is None else change(p) for name, p in original.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(original)


def split_head(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the head of the outermost language model by rows of the vocabulary, in place, over the 1-D `mesh`.

    A tied embedding is split with it. The forward of the head still returns all logits. The head stays replicated if
    the ranks do not divide its rows, if it is not a plain linear layer, or if another module shares its weight.
    """
    for path, model in module.named_modules():
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        if head is not None:
            embedding = model.get_input_embeddings()  # type: ignore[operator]
            if _can_split_head(module, head, embedding, mesh.size()):
                is_tied = embedding.weight is head.weight
                column_wise(f"{path}: the head", head, mesh, gather=True)
                if is_tied:
                    embedding._parameters["weight"] = head.weight
                    _split_embedding(embedding, mesh)
            return


def _can_split_head(module: nn.Module, head: nn.Module, embedding: nn.Module, ranks: int) -> bool:
    if type(head) is not nn.Linear or len(head.weight) % ranks:
        return False
    owners = [child for child in module.modules() if any(p is head.weight for p in child._parameters.values())]
    return all(owner is head or (owner is embedding and isinstance(owner, nn.Embedding)) for owner in owners)


def _split_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Look up the tokens of this rank's rows, and sum over ranks."""
    group, inner = mesh.get_group(), embedding.forward
    rows = dtensors.local(embedding.weight.detach()).shape[0]
    first = mesh.get_local_rank() * rows

    def forward(ids: Tensor) -> Tensor:
        is_other = (ids < first) | (ids >= first + rows)
        padding = embedding.padding_idx
        embedding.padding_idx = None if padding is None or not 0 <= padding - first < rows else padding - first
        try:
            with replaced_parameters(embedding, dtensors.local):
                vectors = inner((ids - first).clamp(0, rows - 1))
        finally:
            embedding.padding_idx = padding  # initializers of the full module read it
        return collectives.summed(vectors.masked_fill(is_other[..., None], 0), group)

    embedding.forward = forward  # type: ignore[method-assign, assignment]
