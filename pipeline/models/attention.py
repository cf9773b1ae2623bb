"""Sequences side by side in one row, none of which sees another: batches without padding.

A row of N tokens is N tokens of work in every linear layer, however the lengths differ; attention runs within each
document. transformers lets an attention function be registered by name and hands it every keyword that the model was
called with, so a forward with `documents=Documents(...)` reaches it in the model's own code. No mask function belongs
to the name, so no mask of N x N is ever made: documents and the layer's window say it all.

On CUDA one call of a variable-length kernel serves all documents, on CPUs one of our own; elsewhere, and where the
kernel doesn't fit, there is one call a document.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from engine import attention, distributed, kernels
from pipeline.data.documents import Documents, Ragged

NAME = "zerochat_documents"


def use_documents(model: PreTrainedModel) -> bool:
    """Select the attention of this file for a model, also for padded rows; False if the model does not allow it."""
    text: Any = model.config.get_text_config()
    takes_name = getattr(model, "_supports_attention_backend", False)
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    capped_dropout = getattr(text, "attn_logit_softcapping", None) and getattr(text, "attention_dropout", 0.0)
    if not takes_name or not takes_positions or capped_dropout:
        return False
    attention_of(model, NAME)
    return True


def attention_of(model: PreTrainedModel, name: str) -> str:
    """Set the attention function of a model by name, and return the previous name."""
    before: str = model.config._attn_implementation
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config._attn_implementation = name
    return before


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    documents: Documents | None = None,
    share: distributed.SequenceShard | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (B, heads, T, size), key and value (B, key heads, T, size); B = 1 and T = N with `documents`.

    Causal: a token sees those before it, of its own document where there are some, at most `sliding_window` of them,
    itself included. With a `share` T is this rank's share of the N tokens, and each rank attends with some heads.
    Returns (B, T, heads, value's size). Raises UnsupportedModel.
    """
    if attention_mask is not None:
        raise attention.UnsupportedModel(f"{type(module).__name__} asks for another kind of attention")
    attention.check_arguments(module, others)
    how = _How(scaling, sliding_window, softcap, dropout)
    if documents is None:
        return how.attend(query, key, value).transpose(1, 2), None
    if share is None:
        return _within(documents, query, key, value, how), None
    return share.heads_to_tokens(_within(documents, *share.tokens_to_heads(query, key, value), how)), None


@dataclass(frozen=True)
class _How:
    """The attention options of a layer."""

    scaling: float | None
    window: int | None
    softcap: float | None
    dropout: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, heads, Q, size) queries, the last Q of K tokens, over (B, key heads, K, size)."""
        mask = self.mask(query.shape[2], key.shape[2], query.device)
        if self.softcap is not None:
            return attention.attend(query, key, value, mask, scaling=self.scaling, softcap=self.softcap)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout, is_causal=mask is None, scale=self.scaling
        )

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the mask (Q, K), True where a query attends to a key; None for plain causal attention."""
        window = keys if self.window is None else self.window
        narrow = keys > window
        if queries == keys and not narrow:
            return None
        places = torch.arange(keys, device=device)
        distance: Tensor = places[keys - queries :, None] - places
        seen = distance >= 0
        return seen & (distance < window) if narrow else seen

    def fits_kernel(self, query: Tensor, value: Tensor) -> bool:
        """Return whether the variable-length kernel supports these options."""
        return self.softcap is None and self.dropout == 0.0 and kernels.varlen_fits(query, value)


def _within(documents: Documents, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """Attend within documents with the fastest implementation: (1, heads, N, size) queries -> (1, N, heads, size)."""
    kernel = kernels.varlen_kernel() if query.is_cuda and how.fits_kernel(query, value) else None
    if kernel is not None:
        return _by_kernel(kernel, query[0], key[0], value[0], documents.ragged(query.device), how)[None]
    return _by_lengths(query, key, value, documents, how)


@torch.compiler.disable
def _by_lengths(query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: _How) -> Tensor:
    """Through loops over documents, which compiled blocks leave alone: they would be compiled anew for each row."""
    on_host = _on_host(query[0], key[0], value[0], documents, how)
    return _one_by_one(query, key, value, documents, how) if on_host is None else on_host[None]


def _on_host(query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: _How) -> Tensor | None:
    """(heads, N, size) queries -> (N, heads, size) by the kernel for CPUs; None where it can't."""
    if query.device.type != "cpu" or how.softcap is not None or how.dropout:
        return None
    if (families := documents.families) is None:
        return None
    scale = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    return kernels.ragged_attention(query, key, value, families, scale=scale, window=how.window)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: _How) -> Tensor:
    """One call a document. Split and joined as a whole: slices would each pass back a gradient as wide as the row."""
    lengths = list(documents.lengths)
    queries, keys, values = (t.split(lengths, dim=2) for t in (query, key, value))
    out = []
    for place in range(len(lengths)):
        before = documents.prefix(place)
        mine = (keys[place], values[place])
        if before is not None:
            mine = (torch.cat([keys[before], mine[0]], dim=2), torch.cat([values[before], mine[1]], dim=2))
        out.append(how.attend(queries[place], *mine).transpose(1, 2))
    return torch.cat(out, dim=1)


def _by_kernel(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, ragged: Ragged, how: _How
) -> Tensor:
    """(heads, N, size) queries -> (N, heads, size), all documents in one call; causal from the last token back."""
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    if ragged.keys is not None:
        k, v = k.index_select(0, ragged.keys), v.index_select(0, ragged.keys)
    starts, longest = (ragged.query_starts, ragged.key_starts), (ragged.longest_query, ragged.longest_key)
    return kernels.within_sequences(kernel, q, k, v, starts, longest, scale=how.scaling, window=how.window)


AttentionInterface.register(NAME, document_attention)
