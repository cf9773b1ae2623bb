"""Every private interface of transformers and peft that the pipeline uses, as `engine/internals.py` for the engine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion
from transformers.modeling_layers import GenericForSequenceClassification


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set a model's attention function by its registered name, without a check."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config._attn_implementation = name


def supports_sdpa(config: PretrainedConfig) -> bool:
    """Return whether transformers has sdpa attention for the language models of a family."""
    model = language_model_class(config)
    return model is None or bool(model._supports_sdpa)


def unused_patterns(model: PreTrainedModel) -> Sequence[str]:
    """Return regular expressions of tensor names that transformers expects in files and does not use."""
    return list(model._keys_to_ignore_on_load_unexpected or [])


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Fill the parameters of one module of a model with random values."""
    model._init_weights(module)


def add_multimodal(config: PretrainedConfig) -> None:
    """Let `AutoModelForCausalLM` build a multimodal model with its image and audio encoders.

    For most multimodal families, transformers has no such class. For others (Llama 4, Qwen 3.5) it has the class of the
    text model, which would lose the encoders of a checkpoint.
    """
    family = type(config)
    complete: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(family, None)
    if complete is None:
        return
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING or complete.__name__ in (config.architectures or []):
        _add_class(AutoModelForCausalLM, family, complete)


def _add_class(auto: Any, family: type[PretrainedConfig], model_class: Any) -> None:
    """Let an auto class build a family. Before transformers 5.19, `register` ignores the families of transformers."""
    auto._model_mapping._extra_content[family] = model_class


def language_model_class(config: PretrainedConfig) -> Any:
    """Return the class of a family's language models; None if `AutoModelForCausalLM` has none."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def add_classifier(config: PretrainedConfig) -> None:
    """Let `AutoModelForSequenceClassification` build a family for which transformers has no such class.

    The class is the one that transformers has for Llama, Qwen and others: the family's base model with a linear head
    named score, for each token.
    """
    family = type(config)
    base: Any = MODEL_MAPPING.get(family, None)
    has_base = base not in (None, MODEL_FOR_MULTIMODAL_LM_MAPPING.get(family, None))  # Llama 4: the base has a head
    if family in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or family not in MODEL_FOR_CAUSAL_LM_MAPPING or not has_base:
        return
    parent = base.__mro__[1]  # the family's PreTrainedModel
    name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
    fields = {"config_class": family, "base_model_prefix": parent.base_model_prefix, "__module__": base.__module__}
    classifier = type(name, (GenericForSequenceClassification, parent), fields)
    _add_class(AutoModelForSequenceClassification, family, classifier)
    renamings = get_checkpoint_conversion_mapping(language_model_class(config).__name__)
    if renamings is not None:  # Qwen 2.5 VL: transformers has them for the class of the language model only
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)


def reverse_conversion(model: PreTrainedModel) -> Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]:
    """Return a function that turns a tensor of the model into those that transformers writes to files, by name.

    A family whose files merge several tensors into one keeps its own tensors. Transformers reads both.
    """
    rules = [
        rule
        for rule in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(rule, PrefixChange)  # the prefix of the checkpoint that the model was loaded from
    ]
    merges = any(len(rule.reverse_transform().source_patterns) > 1 for rule in rules)
    if not rules or merges:
        return lambda name, tensor: [(name, tensor)]

    holder: Any = model
    holder._weight_conversions = rules  # as from_pretrained sets it

    def revert(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        found = revert_weight_conversion(model, {name: tensor})
        # Parts of one tensor share its memory, which safetensors does not write.
        return found.items() if len(found) == 1 else [(part, value.clone()) for part, value in found.items()]

    return revert


def stacks_experts(config: PretrainedConfig) -> bool:
    """Return whether transformers stacks the experts of a family's files in one parameter."""
    rules = get_checkpoint_conversion_mapping(config.model_type) or []
    return any(isinstance(rule, WeightConverter) for rule in rules)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Disable the adapters inside this context. The model without adapters is the reference of a LoRA policy."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
