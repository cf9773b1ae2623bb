"""Small random models of many families, and greedy decoding by the definition: transformers' forward of all tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.generation.prepacked_linears import copies_weights
from engine.internals import has_onednn
from engine.kernels_cpu import attention as decode_attention

VOCABULARY, POSITIONS = 97, 64
ENDS = (5, 6, 7, 8, 9, 10, 11, 12)  # an eighth of the vocabulary, so that answers have different lengths

_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_MODERN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_GROUPED: dict[str, Any] = _MODERN | {"num_key_value_heads": 2, "head_dim": 8}
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "opt": _MODERN | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neox": _MODERN,
    "phi": _MODERN,
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "mistral": _GROUPED | {"sliding_window": 6},
    "gemma2": _GROUPED | {"sliding_window": 6, "layer_types": _MIXED, "attn_logit_softcapping": 0.3},
    "gemma3_text": _GROUPED | {"sliding_window": 6, "layer_types": _MIXED},
    "mixtral": _GROUPED | {"num_local_experts": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
}


def build(family: str, **changes: Any) -> nn.Module:
    """Return an fp32 model of one family, with weights large enough that answers differ between prompts."""
    fields = FAMILIES[family] | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(fields | changes))
    # sdpa caps no scores: newer versions of transformers take another attention by themselves, older ones say nothing.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if capped else None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.eval()


def use_decode_attention(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention of decode steps by the "C" kernel, or by "torch" as on machines without a compiler."""
    if kernels == "torch":
        monkeypatch.setattr(decode_attention, "supports", lambda dtype: False)
    elif not decode_attention.supports(torch.float32):
        pytest.skip("no C compiler")


def ragged_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(13, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def plain_logits(model: nn.Module, prompt: list[int], answer: Sequence[int]) -> Tensor:
    """Return logits (n + 1, V) before and after each of n tokens, by one forward without cache, padding or mask."""
    return model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 :].double()


def greedy_by_definition(
    model: nn.Module, prompt: list[int], answer: Sequence[int], steps: int
) -> tuple[list[int], list[float]]:
    """Return the most probable tokens after the tokens of `answer`, to the end, and their log-probabilities.

    They equal `answer` exactly if it is the greedy answer of at most `steps` tokens. One forward suffices, because the
    model is causal.
    """
    logits = plain_logits(model, prompt, answer)[:steps]
    tokens = logits.argmax(-1).tolist()
    count = next((index + 1 for index, token in enumerate(tokens) if token in ENDS), len(tokens))
    return tokens[:count], logits.log_softmax(-1).amax(-1)[:count].tolist()


def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` can be prepared on this machine."""
    return not copies_weights(dtype) or has_onednn(dtype)
