"""A model as one rank of a tensor group holds it, on the meta device: narrower matrices, no collectives, for counting.

What engine/parallel/tensor.py splits by a plan, and head.py of the head, is cut here to one rank's share of it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.parallel import tensor


def narrow(module: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> None:
    """Cut a module's parameters, in place, to a share of one of `ranks`.

    Raises ValueError for a module without a plan.
    """
    plan = plan or tensor.plan_of(module)
    inside = {pattern: style for pattern, style in plan.items() if "*" in pattern}
    for path, child in list(module.named_modules()):
        style = tensor.style_of(path, inside)
        if style in tensor.LINEAR:
            by_column = style in tensor.COLUMNS
            _cut(child, "weight", 0 if by_column else 1, ranks)
            if by_column:
                _cut(child, "bias", 0, ranks)
        elif style == "moe_tp_experts":
            for leaf, parameter in list(child.named_parameters(recurse=False)):
                dim, _ = tensor.EXPERTS[str(tensor.style_of(f"{path}.{leaf}", inside))]
                _cut(child, leaf, parameter.ndim + dim, ranks)
        elif style == "local_heads":
            for name in tensor.HEAD_COUNTS:
                if isinstance(count := getattr(child, name, None), int):
                    setattr(child, name, count // ranks)
    _cut_head(module, ranks)


def _cut_head(module: nn.Module, ranks: int) -> None:
    """The vocabulary's rows, and with them those of an embedding that is tied to them."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    if type(head) is not nn.Linear or len(head.weight) % ranks:
        return
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    tied = embedding.weight is head.weight
    _cut(head, "weight", 0, ranks)
    if tied:
        embedding._parameters["weight"] = head.weight


def _cut(owner: nn.Module, leaf: str, dim: int, ranks: int) -> None:
    whole: Tensor | None = owner._parameters[leaf]
    if whole is None:
        return
    shape = list(whole.shape)
    shape[dim] //= ranks
    owner._parameters[leaf] = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad)
