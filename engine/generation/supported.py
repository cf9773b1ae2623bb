"""Check by a model's configuration whether the slot cache supports it, and how long its sequences may be."""

import inspect
from typing import Any

from torch import nn

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


class UnsupportedModel(Exception):
    """Raised if a model needs something that attention over the slot cache does not compute. The message gives it."""


def check_model(module: nn.Module) -> bool:
    """Check that the slot cache supports a model; return whether the model can compute chosen logits only.

    Raises UnsupportedModel if not.
    """
    text = _text_config(module)
    names = set(inspect.signature(module.forward).parameters)
    if not getattr(module, "_supports_attention_backend", False) or "position_ids" not in names:
        raise UnsupportedModel("its class does not let an attention function be registered")
    unsupported = set(getattr(text, "layer_types", None) or []) - SUPPORTED_LAYERS
    if unsupported:
        raise UnsupportedModel(f"it has layers of other types ({', '.join(sorted(unsupported))})")
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModel("it has layers that share their keys")
    return "logits_to_keep" in names


def max_positions(module: nn.Module) -> int | None:
    """Return how many tokens a sequence may have; None if the configuration does not limit it.

    Some families reserve the first rows of their position table for padding, which no configuration field contains.
    Models whose rotary frequencies change in longer sequences end there (`frequency_change`).
    """
    text, change = _text_config(module), frequency_change(module)
    if change is not None:
        return change
    rows: int | None = getattr(text, "max_position_embeddings", None)
    if rows is not None and rows < 1:  # XLNet has -1
        return None
    for child in module.modules():
        if isinstance(child, nn.Embedding) and child.num_embeddings == rows != text.vocab_size:
            return rows if child.padding_idx is None else rows - child.padding_idx - 1
    return rows


def frequency_change(module: nn.Module) -> int | None:
    """Return the length above which all rotary frequencies change (LongRoPE: Ding et al., 2024); None if they do not.

    transformers chooses the frequencies by the longest sequence of a forward. Beyond this length the numbers of a token
    would depend on the other sequences, and cached keys would be wrong once their sequence grows longer.
    """
    rope: dict[str, Any] = getattr(_text_config(module), "rope_parameters", None) or {}
    each = [rope] if "rope_type" in rope else [by_layer for by_layer in rope.values() if isinstance(by_layer, dict)]
    changes = [one["original_max_position_embeddings"] for one in each if one.get("rope_type") == "longrope"]
    return min(changes, default=None)


def has_window(module: nn.Module) -> bool:
    """Return whether the configuration lets some layers attend to the last tokens only."""
    text = _text_config(module)
    if getattr(text, "layer_types", None):
        return "sliding_attention" in text.layer_types
    return getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)


def _text_config(module: nn.Module) -> Any:
    return module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
