"""Sizes of a model, counted on the meta device: no weight is allocated and no file is read."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from engine.parallel import tensor, zero


class Linear(NamedTuple):
    """A linear layer. `is_transposed` marks a weight of shape (inputs, outputs), as in GPT-2."""

    name: str
    inputs: int
    outputs: int
    is_transposed: bool
    is_head: bool

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Parameter counts and widths of one transformer.

    parameters: all of them, tied ones once. root: those outside of the blocks. block: those of the largest block.
    embedding: those of embedding layers outside of the blocks. tied: those that the embedding shares with the head.
    cache_per_token: numbers of one token's keys and values in all blocks. queries: width of a block's attention output.
    vocabulary: rows of the head, 0 for a model that scores. Under tensor parallelism of `tensor` ranks, split by
    `plan`, all counts are those of one rank.
    """

    name: str
    config: PretrainedConfig
    attention: str
    parameters: int
    root: int
    block: int
    blocks: int
    width: int
    vocabulary: int
    cache_per_token: int
    embedding: int = 0
    tied: int = 0
    linears: tuple[Linear, ...] = ()
    tensor: int = 1
    queries: int = 0
    plan: Mapping[str, str] | None = None


def measure_shape(
    name: str,
    config: PretrainedConfig,
    attention: str | None = "sdpa",
    tensor: int = 1,
    plan: Mapping[str, str] | None = None,
    *,
    scores: bool = False,
) -> ModelShape:
    """Build the model on the meta device and count. `scores` replaces the head by a single output.

    Raises ValueError for an architecture that transformers cannot build, or that `tensor` ranks cannot split.
    """
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        config = copy.deepcopy(config)
        config.num_labels = 1
    try:
        with torch.device("meta"):
            model = kind.from_config(config, attn_implementation=attention)
    except ValueError as error:
        raise ValueError(f"{name} cannot be built: {_reason(error, config, scores=scores)}") from error
    text = config.get_text_config()
    heads = _field(text, "num_attention_heads") or 0  # 0 for state-space models
    groups = _field(text, "num_key_value_heads") or heads
    if heads % tensor or groups % tensor:
        raise ValueError(
            f"tensor_parallel={tensor} does not divide the heads of {name}: {heads} query heads, {groups} key heads"
        )
    head_width = _field(text, "head_dim") or (text.hidden_size // heads if heads else 0)
    if tensor > 1:
        shrink_to_one_rank(model, tensor, plan)
    blocks = [_count(block) for block in zero.units(model)]
    inside = {id(module) for block in zero.units(model) for module in block.modules()}
    outer = {p for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inside for p in m.parameters()}
    head = model.get_output_embeddings()
    return ModelShape(
        name=name,
        config=config,
        attention=model.config._attn_implementation,
        parameters=_count(model),
        root=_count(model) - sum(blocks),
        block=max(blocks, default=0),
        blocks=len(blocks),
        width=text.hidden_size,
        vocabulary=0 if scores else text.vocab_size if head is None else len(head.weight),
        cache_per_token=2 * text.num_hidden_layers * groups * head_width // tensor,
        embedding=sum(p.numel() for p in outer),
        tied=head.weight.numel() if head is not None and head.weight in outer else 0,
        linears=tuple(_linears(model, head)),
        tensor=tensor,
        queries=heads * head_width // tensor,
        plan=plan,
    )


def pipeline_stages(shape: ModelShape, ranks: int) -> tuple[ModelShape, ...]:
    """Return the shape of each pipeline stage: embeddings on the first, norm and head on the last, blocks on all.

    A tied embedding counts on the first and on the last stage. Raises ValueError for fewer blocks than ranks.
    """
    if shape.blocks < ranks:
        raise ValueError(f"pipeline_parallel={ranks} is more than the {shape.blocks} blocks of {shape.name}")
    stages = []
    for rank in range(ranks):
        blocks = shape.blocks // ranks + (rank < shape.blocks % ranks)
        first, last = rank == 0, rank == ranks - 1
        root = first * shape.embedding + last * (shape.root - shape.embedding + shape.tied)
        vocabulary = shape.vocabulary if last else 0
        total = root + blocks * shape.block
        stages.append(replace(shape, parameters=total, root=root, blocks=blocks, vocabulary=vocabulary))
    return tuple(stages)


def shrink_to_one_rank(module: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> None:
    """Shrink a module's parameters in place to one tensor-parallel rank's share, on the meta device, for counting.

    Raises ValueError for a module without a tensor-parallel plan.
    """
    plan = plan or tensor.plan_of(module)
    inside = {pattern: style for pattern, style in plan.items() if "*" in pattern}
    for path, child in list(module.named_modules()):
        style = tensor.style_of(path, inside)
        if style in tensor.LINEAR:
            by_column = style in tensor.COLUMNS
            _shrink(child, "weight", 0 if by_column else 1, ranks)
            if by_column:
                _shrink(child, "bias", 0, ranks)
        elif style == "moe_tp_experts":
            for leaf, parameter in list(child.named_parameters(recurse=False)):
                dim, _ = tensor.EXPERTS[str(tensor.style_of(f"{path}.{leaf}", inside))]
                _shrink(child, leaf, parameter.ndim + dim, ranks)
        elif style == "local_heads":
            for name in tensor.HEAD_COUNTS:
                if isinstance(count := getattr(child, name, None), int):
                    setattr(child, name, count // ranks)
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    if type(head) is nn.Linear and len(head.weight) % ranks == 0:
        embedding = module.get_input_embeddings()  # type: ignore[operator]
        is_tied = embedding.weight is head.weight
        _shrink(head, "weight", 0, ranks)
        if is_tied:
            embedding._parameters["weight"] = head.weight


def _shrink(owner: nn.Module, leaf: str, dim: int, ranks: int) -> None:
    full: Tensor | None = owner._parameters[leaf]
    if full is not None:
        shape = list(full.shape)
        shape[dim] //= ranks
        owner._parameters[leaf] = nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta"), full.requires_grad)


def _reason(error: ValueError, config: PretrainedConfig, *, scores: bool) -> str:
    """Return the first line of transformers' message, or a clearer one."""
    reason = str(error).partition("\n")[0]
    if "scaled_dot_product_attention" in reason:
        return "transformers has no sdpa attention for it; set attention to eager"
    if scores and "Unrecognized configuration class" in reason:
        return f"transformers has no sequence classification of {config.model_type} for reward model and critic"
    return reason


def _field(text: PretrainedConfig, name: str) -> int | None:
    """Return a number of the configuration; where layers differ, that of most layers."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # configurations with per-layer values refuse a global read
        per_layer = copy.deepcopy(text)
        per_layer.allow_global_per_layer_attribute_access = True
        return getattr(per_layer, name, None)


def _linears(model: nn.Module, head: nn.Module | None) -> Iterator[Linear]:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D):
            is_transposed = isinstance(layer, Conv1D)
            outputs, inputs = reversed(layer.weight.shape) if is_transposed else layer.weight.shape
            yield Linear(name, inputs, outputs, is_transposed, layer is head or name == "score")


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
