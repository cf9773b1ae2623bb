"""Count the parameters of a model on the meta device: no weight is allocated and no file is read."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from engine.internals import attention_name
from engine.parallel import tensor as tensor_parallelism
from engine.parallel import zero

# Settings in which the models of a run differ, and their bodies do not.
NOT_OF_THE_BODY = ("_name_or_path", "architectures", "dtype", "id2label", "label2id")


class Linear(NamedTuple):
    """A linear layer: its name, the shape of its weight, and whether it is the head."""

    name: str
    shape: tuple[int, ...]
    is_head: bool

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Parameter counts and widths of one model. The defaults describe a module without embedding, head and attention.

    parameters: all of them, tied ones once. root: those outside of the blocks. block: those of the largest block.
    embedding: those of embedding layers outside of the blocks. head: those of the head, which `is_tied` shares with the
    embedding. vocabulary: rows of the head, 0 for a model that scores. cache_per_token: numbers of one token's keys and
    values in all blocks. With tensor parallelism over `tensor` ranks, all counts but `linears` are those of one rank.
    """

    parameters: int
    root: int
    block: int
    blocks: int = 1
    width: int = 0
    embedding: int = 0
    head: int = 0
    is_tied: bool = False
    vocabulary: int = 0
    cache_per_token: int = 0
    linears: tuple[Linear, ...] = ()
    tensor: int = 1
    name: str = ""
    config: PretrainedConfig = field(default_factory=PretrainedConfig)
    attention: str = "sdpa"

    @cached_property
    def body_settings(self) -> str:
        """The settings of the configuration that the body may depend on, as a text that can be a key."""
        return repr(sorted((key, value) for key, value in self.config.to_dict().items() if key not in NOT_OF_THE_BODY))

    @property
    def root_unit(self) -> int:
        """Parameters of the root unit, which ZeRO stage 3 holds gathered during a pass.

        Embedding and head are units of their own (`zero.outer_layers`), unless they are tied.
        """
        return self.root if self.is_tied else self.root - self.embedding - self.head

    @property
    def largest_released(self) -> int:
        """Parameters of the largest unit next to the root unit: embedding, blocks and head take turns."""
        return self.block if self.is_tied else max(self.embedding, self.head, self.block)


def measure_shape(
    name: str,
    config: PretrainedConfig,
    attention: str | None = "sdpa",
    tensor: int = 1,
    plan: Mapping[str, str] | None = None,
    *,
    scores: bool = False,
) -> ModelShape:
    """Build the model on the meta device and count its parameters. `scores` replaces the head by a single output.

    Tensor parallelism splits the head and each matrix of a block over `tensor` ranks. `plan` is the model's
    tensor-parallel plan, by default that of its class. Raises ValueError for an architecture that transformers cannot
    build, and for a model that `tensor` ranks cannot split.
    """
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        config = copy.deepcopy(config)
        config.num_labels = 1
    try:
        with torch.device("meta"):
            model = kind.from_config(config, attn_implementation=attention)
    except ValueError as error:
        reason = str(error).partition("\n")[0]  # the rest is advice
        raise ValueError(f"{name} cannot be built: {reason}") from error
    text = config.get_text_config()
    heads = _field(text, "num_attention_heads") or 0  # 0 for state-space models
    groups = _field(text, "num_key_value_heads") or heads
    if heads % tensor or groups % tensor:
        raise ValueError(
            f"tensor_parallel={tensor} does not divide the heads of {name}: {heads} query heads, {groups} key heads"
        )
    if tensor > 1 and not plan:
        tensor_parallelism.plan_of(model)  # raises ValueError for a model without a plan
    head_width = _field(text, "head_dim") or (text.hidden_size // heads if heads else 0)
    units = zero.units(model)
    blocks = [_parameters(block, tensor) for block in units]
    inside = {id(module) for block in units for module in block.modules()}
    outer = {p for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inside for p in m.parameters()}
    head = model.get_output_embeddings()
    head_size = 0 if head is None else head.weight.numel()
    head_ranks = tensor if head is not None and len(head.weight) % tensor == 0 else 1
    root = _parameters(model) - sum(map(_parameters, units)) - head_size + head_size // head_ranks
    return ModelShape(
        parameters=root + sum(blocks),
        root=root,
        block=max(blocks, default=0),
        blocks=len(blocks),
        width=text.hidden_size,
        embedding=sum(p.numel() for p in outer),
        head=head_size // head_ranks,
        is_tied=head is not None and head.weight in outer,
        vocabulary=0 if scores else text.vocab_size if head is None else len(head.weight) // head_ranks,
        cache_per_token=2 * text.num_hidden_layers * groups * head_width // tensor,
        linears=tuple(
            Linear(path, layer.weight.shape, layer is head or path == "score")
            for path, layer in model.named_modules()
            if isinstance(layer, nn.Linear | Conv1D)
        ),
        tensor=tensor,
        name=name,
        config=config,
        attention=attention_name(model),
    )


def largest_pipeline_stage(shape: ModelShape, ranks: int) -> ModelShape:
    """Return an upper bound of the stages of a pipeline: the larger end of the model, and its share of the blocks.

    The first stage has the embeddings, the last one norm and head, with a tied embedding once more. Raises ValueError
    for fewer blocks than ranks.
    """
    if shape.blocks < ranks:
        raise ValueError(f"pipeline_parallel={ranks} is more than the {shape.blocks} blocks of {shape.name}")
    blocks = math.ceil(shape.blocks / ranks)
    root = max(shape.embedding, shape.root - shape.embedding + shape.is_tied * shape.head)
    return replace(shape, parameters=root + blocks * shape.block, root=root, blocks=blocks, embedding=0, head=0)


def _parameters(module: nn.Module, ranks: int = 1) -> int:
    """Return the parameters on one of `ranks` tensor-parallel ranks: a share of each matrix, all norms and biases."""
    return sum(p.numel() // (ranks if p.ndim > 1 else 1) for p in module.parameters())


def _field(text: PretrainedConfig, name: str) -> int | None:
    """Return a number of the configuration; where layers differ, that of most layers."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # configurations with per-layer values refuse a global read
        per_layer = copy.deepcopy(text)
        per_layer.allow_global_per_layer_attribute_access = True
        return getattr(per_layer, name, None)
