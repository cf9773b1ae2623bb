"""Every private interface of transformers and peft that the pipeline uses, as `engine/internals.py` for the engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set a model's attention function by its registered name, without a check."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config._attn_implementation = name


def unused_patterns(model: PreTrainedModel) -> Sequence[str]:
    """Return regular expressions of tensor names that transformers expects in files and does not use."""
    return list(model._keys_to_ignore_on_load_unexpected or [])


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Fill the parameters of one module of a model with random values."""
    model._init_weights(module)


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
