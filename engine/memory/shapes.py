"""The shape of a model, counted on the meta device: nothing is allocated, no weight is read."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.pytorch_utils import Conv1D

from engine.memory.narrowed import narrow
from engine.parallel import zero

NAMED = Path(__file__).resolve().parents[2] / "conf" / "model"


class Linear(NamedTuple):
    """A linear layer: what it takes, what it gives; `turned` where its weight lies (in, out)."""

    name: str
    ins: int
    outs: int
    turned: bool
    is_head: bool

    @property
    def numbers(self) -> int:
        return self.ins * self.outs


@dataclass(frozen=True, eq=False)
class Shape:
    """Sizes of one causal language model.

    parameters: P, tied ones once. largest_layer: the most that one module owns itself. root: parameters outside of the
    blocks (embeddings and head). block: of the largest block. cache_per_token: numbers in one token's key-value cache.
    queries: numbers that a block's attention puts out for a token. vocabulary: rows of the head, 0 where it scores.
    linears: the linear layers, the head too where it is tied. All of one rank of a group of `tensor`, split by `plan`
    (None: the model's own).
    """

    name: str
    config: PretrainedConfig
    attention: str
    parameters: int
    largest_layer: int
    root: int
    block: int
    blocks: int
    width: int
    vocabulary: int
    cache_per_token: int
    linears: tuple[Linear, ...] = ()
    tensor: int = 1
    queries: int = 0
    plan: Mapping[str, str] | None = None


def shape_of(model: str | dict[str, Any], tensor: int = 1, *, scores: bool = False) -> Shape:
    """The shape of a folder with a config.json, of an option's name (conf/model), or of an architecture.

    An architecture is a dictionary, or its JSON, with model_type and the fields of transformers' configuration. Counts
    are those of one rank of a group of `tensor`; `scores` as in `measured`. Raises ValueError for what is none of
    these.
    """
    if isinstance(model, str) and model.lstrip().startswith("{"):
        try:
            model = json.loads(model)
        except json.JSONDecodeError as error:
            raise ValueError(f"model={model} is not JSON: {error}") from error
    if isinstance(model, dict):
        name = str(model.get("name", model.get("model_type")))
        return measured(name, build_config(model), None, tensor, scores=scores)
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return measured(folder.name, AutoConfig.from_pretrained(folder), None, tensor, scores=scores)
    option = NAMED / f"{model}.yaml"
    if not option.is_file():
        names = ", ".join(sorted(place.stem for place in NAMED.glob("*.yaml")))
        said = model or "an empty name"
        raise ValueError(f"{said} is no folder with a config.json and no name of conf/model: {names}")
    import yaml

    found = yaml.safe_load(option.read_text(encoding="utf-8"))
    config, plan = build_config(found["architecture"]), found.get("tensor_plan")
    return measured(model, config, found.get("attention"), tensor, plan, scores=scores)


def build_config(architecture: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of an architecture: model_type and the family's own fields. Raises ValueError for no family."""
    fields = {key: value for key, value in architecture.items() if key not in ("model_type", "name")}
    if "model_type" not in architecture:
        raise ValueError("architecture: model_type is missing, the family in transformers' words (opt, llama, qwen3)")
    family = architecture["model_type"]
    if family not in CONFIG_MAPPING:
        near = " or ".join(get_close_matches(family, CONFIG_MAPPING))
        raise ValueError(f"model_type={family}: transformers has no such family{near and f'; did you mean {near}?'}")
    try:
        return AutoConfig.for_model(family, **fields)
    except Exception as error:  # each family checks its fields in its own way
        reason = " ".join(str(error).split())
        raise ValueError(f"architecture: these are no fields of {family}: {reason}") from error


def measured(
    name: str,
    config: PretrainedConfig,
    attention: str | None = "sdpa",
    tensor: int = 1,
    plan: Mapping[str, str] | None = None,
    *,
    scores: bool = False,
) -> Shape:
    """Build it on the meta device and count; with `scores` the model that has one output in the place of its head.
    Without `attention` it has what its family can do.

    Raises ValueError where there is no such model, and no plan for tensor groups.
    """
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        config = copy.deepcopy(config)
        config.num_labels = 1
    try:
        with torch.device("meta"):
            model = kind.from_config(config, attn_implementation=attention)
    except ValueError as error:
        reason = str(error).partition("\n")[0]  # lists and advice follow
        if "scaled_dot_product_attention" in reason:
            reason = "it has no sdpa attention in transformers: model.attention=eager"
        if scores and "Unrecognized configuration class" in reason:
            reason = f"transformers has no sequence classification of {config.model_type} for reward model and critic"
        raise ValueError(f"{name} can't be measured: {reason}") from error
    text = config.get_text_config()
    heads = _told(text, "num_attention_heads") or 0  # none where a state is kept instead of keys
    groups = _told(text, "num_key_value_heads") or heads
    if heads % tensor or groups % tensor:
        raise ValueError(
            f"tensor_parallel={tensor} does not divide {name}'s heads: {heads}, of keys and values {groups}"
        )
    if tensor > 1:
        narrow(model, tensor, plan)
    total = _count(model)
    blocks = [_count(block) for block in zero.units(model)]
    head = _told(text, "head_dim") or (text.hidden_size // heads if heads else 0)
    return Shape(
        name=name,
        config=config,
        attention=model.config._attn_implementation,
        parameters=total,
        largest_layer=max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()),
        root=total - sum(blocks),
        block=max(blocks, default=0),
        blocks=len(blocks),
        width=text.hidden_size,
        vocabulary=0 if scores else _outputs(model, text.vocab_size),
        cache_per_token=2 * text.num_hidden_layers * groups * head // tensor,
        linears=tuple(_linears(model)),
        tensor=tensor,
        queries=heads * head // tensor,
        plan=plan,
    )


def _told(text: PretrainedConfig, name: str) -> int | None:
    """A number of the configuration; where layers have one each, that of most."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # what a configuration by layers says when it is asked for all
        of_layers = copy.deepcopy(text)
        of_layers.allow_global_per_layer_attribute_access = True
        return getattr(of_layers, name, None)


def _linears(model: nn.Module) -> Iterator[Linear]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D):
            turned = isinstance(layer, Conv1D)
            first, second = layer.weight.shape
            ins, outs = (first, second) if turned else (second, first)
            yield Linear(name, ins, outs, turned, layer is head or name == "score")


def _outputs(model: nn.Module, vocabulary: int) -> int:
    """Rows of the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return vocabulary if head is None else len(head.weight)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
