"""Which models can decode by slots, as far as their configuration says."""

import inspect
from typing import Any

from torch import nn

from engine.generation.attention import Unserved

SERVED_LAYERS = {"full_attention", "sliding_attention"}


def check_model(module: nn.Module) -> bool:
    """Raise Unserved for a model that can't use the slot cache; returns whether it can compute chosen logits only."""
    config: Any = module.config
    text: Any = config.get_text_config(decoder=True)
    names = set(inspect.signature(module.forward).parameters)
    if not getattr(module, "_supports_attention_backend", False) or "position_ids" not in names:
        raise Unserved("its attention can't be reached by name")
    kinds: list[str] = getattr(text, "layer_types", None) or []
    odd, shares_keys = set(kinds) - SERVED_LAYERS, bool(getattr(text, "num_kv_shared_layers", None))
    if odd or shares_keys:
        raise Unserved(f"it has layers of another kind ({', '.join(sorted(odd)) or 'with shared keys'})")
    return "logits_to_keep" in names


def positions_of(module: nn.Module) -> int | None:
    """How many tokens a sequence may have; None where the configuration says nothing.

    Some families keep the first rows of their positions for padding, which no configuration tells. Those that turn by
    other frequencies in longer sequences have none beyond (`turns_at`).
    """
    text: Any = module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    turn = turns_at(module)
    if turn is not None:
        return turn
    rows: int | None = getattr(text, "max_position_embeddings", None)
    if rows is not None and rows < 1:  # XLNet's -1
        return None
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.num_embeddings == rows != text.vocab_size:
            return rows if part.padding_idx is None else rows - part.padding_idx - 1
    return rows


def turns_at(module: nn.Module) -> int | None:
    """Above how many tokens every rotary position of a sequence changes (LongRoPE: Ding et al., 2024); None if never.

    transformers looks at the longest sequence of a forward. So beyond this length a token's numbers would depend on
    what stands beside it, and what is cached of a sequence would be another's once it grows longer.
    """
    text: Any = module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    each = [given] if "rope_type" in given else [part for part in given.values() if isinstance(part, dict)]
    turns = [part["original_max_position_embeddings"] for part in each if part.get("rope_type") == "longrope"]
    return min(turns, default=None)


def has_window(text: Any) -> bool:
    """Whether a configuration makes some layers attend to the last tokens only."""
    if getattr(text, "layer_types", None):
        return "sliding_attention" in text.layer_types
    return getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
