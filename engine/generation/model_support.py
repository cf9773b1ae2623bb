"""Whether the slot cache supports a model, and whether two forwards of a model agree.

The configuration shows which layers the slot cache cannot run and how long a sequence may be. The decode loop and the
generation by transformers then run fixed prompts and compare their logits with those of the plain forward.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
NEW_TOKENS = 8
LENGTHS = (5, 12, 10)  # tokens of the prompts; unequal lengths reveal swapped slots and wrong padding
# Relative, of logits. Measured in bf16: 0.01 to 0.04 over 12 to 28 layers with random weights.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SAME_COMPUTATION = 1e-6  # relative: the same operations in the same order


class UnsupportedModel(Exception):
    """Raised if a model needs something that attention over the slot cache does not compute. The message gives it."""


def check_model(module: nn.Module) -> None:
    """Raise UnsupportedModel if the configuration shows that the slot cache does not support a model."""
    text, names = _text_config(module), inspect.signature(module.forward).parameters
    if not getattr(module, "_supports_attention_backend", False) or "position_ids" not in names:
        raise UnsupportedModel("its class does not let an attention function be registered")
    unsupported = set(getattr(text, "layer_types", None) or []) - SUPPORTED_LAYERS
    if unsupported:
        raise UnsupportedModel(f"it has layers of other types ({', '.join(sorted(unsupported))})")
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModel("it has layers that share their keys")


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


def fixed_prompts(module: nn.Module) -> list[list[int]]:
    """Return prompts of random token ids, the same at each call, no longer than the model's positions allow.

    Each prompt contains the padding token, which users' prompts may contain if it is also the end token.
    """
    vocabulary = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    limit = max_positions(module) or 1 << 30
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max(1, limit - NEW_TOKENS)) for length in LENGTHS]
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
    padding = getattr(_text_config(module), "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        for prompt in prompts:
            prompt[len(prompt) // 2] = padding
    return prompts


@torch.inference_mode()
def plain_logits(module: nn.Module, device: torch.device, token_ids: Sequence[int], **extra: Any) -> Tensor:
    """Return the logits (tokens, V) of one forward over a sequence, without cache and padding."""
    logits: Tensor = module(input_ids=torch.tensor([token_ids], device=device), use_cache=False, **extra).logits
    return logits[0]


def counts_from_zero(module: nn.Module, device: torch.device) -> bool:
    """Return whether a module's own positions are 0, 1, ... (True for a module that takes no positions)."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return True
    prompt = fixed_prompts(module)[0]
    from_zero = plain_logits(module, device, prompt, position_ids=torch.arange(len(prompt), device=device)[None])
    own = plain_logits(module, device, prompt)
    return bool((from_zero.double() - own.double()).norm() <= SAME_COMPUTATION * own.double().norm())


def logits_differ(module: nn.Module, logits: Tensor, plain: Tensor) -> bool:
    """Return whether two logits (n, V) differ by more than rounding explains, relative to their norms, in a row.

    If rounding may route a token to another expert, more than half of the rows must differ.
    """
    dtype = precision(module)
    gaps = (logits.double() - plain.double()).norm(dim=-1) / plain.double().norm(dim=-1)
    may_reroute = dtype != torch.float32 and has_routing(module)
    return not bool((gaps.median() if may_reroute else gaps.max()) <= LOGIT_TOLERANCE.get(dtype, 1e-1))


def has_routing(module: nn.Module) -> bool:
    """Return whether the names of submodules show that experts, or tokens to attend to, are selected by a score."""
    leaves = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return any("expert" in leaf or "indexer" in leaf for leaf in leaves)


def precision(module: nn.Module) -> torch.dtype:
    """Return the precision of the embedding; some models compute their logits in fp32."""
    return module.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]
