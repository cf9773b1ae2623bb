"""Attention within the documents of a packed row (batches without padding).

The linear layers process the N tokens of a packed row, whatever the lengths of the documents. Attention is computed
within each document. transformers finds attention functions by a registered name, and passes them every keyword
argument of the model's forward. A forward with `documents=Documents(...)` thus passes the documents to the function of
this file, in the model's own code. No mask function is registered under the name, so transformers makes no (N, N) mask.
The documents and the window of the layer define which tokens a query attends to.

On CUDA one call of a variable-length kernel computes all documents. On CPUs one call of the kernel
`engine.kernels.ragged_attention` does. Other devices, and options that no kernel supports, need one call per document.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engine import attention, distributed, kernels
from pipeline.data.batch import Documents, Ragged
from pipeline.models.internals import set_attention

NAME = "zerochat_documents"


def use_documents(model: PreTrainedModel) -> bool:
    """Select the attention of this file for a model. Return False and change nothing if the model does not support it.

    The selected attention also serves padded rows.
    """
    text: Any = model.config.get_text_config()
    takes_name = getattr(model, "_supports_attention_backend", False)
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    capped_dropout = getattr(text, "attn_logit_softcapping", None) and getattr(text, "attention_dropout", 0.0)
    if not takes_name or not takes_positions or capped_dropout:
        return False
    set_attention(model, NAME)
    return True


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
    """Return the causal attention of a layer, (B, T, heads, size of values).

    query: (B, heads, T, size). key and value: (B, key heads, T, size)
    documents: the documents of a packed row, which requires B = 1; a token attends only to its document and its prefix
    share: this rank's shard of the N tokens of the row; T is then the length of the shard, and each rank computes the
    attention of some heads for all tokens
    sliding_window: the largest number of tokens that a token attends to, itself included

    Raises UnsupportedModel if the layer needs a mask, or an argument that this function does not support.
    """
    if attention_mask is not None:
        raise attention.UnsupportedModel(
            f"{type(module).__name__} passes an attention mask, which document attention does not support"
        )
    attention.check_arguments(module, others)
    options = _Options(scaling, sliding_window, softcap, dropout)
    if documents is None:
        return options.attend(query, key, value).transpose(1, 2), None
    if share is None:
        return _attend_documents(documents, query, key, value, options), None
    return share.heads_to_tokens(_attend_documents(documents, *share.tokens_to_heads(query, key, value), options)), None


@dataclass(frozen=True)
class _Options:
    """The attention options of a layer."""

    scaling: float | None
    window: int | None
    softcap: float | None
    dropout: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the causal attention of the last Q of K tokens, (B, heads, Q, size of values).

        query: (B, heads, Q, size). key and value: (B, key heads, K, size)
        """
        return attention.attend(
            query, key, value,
            scaling=self.scaling, window=self.window, softcap=self.softcap, dropout=self.dropout,
        )  # fmt: skip

    def fits_kernel(self, query: Tensor, value: Tensor) -> bool:
        """Return whether the variable-length kernel supports these options."""
        return self.softcap is None and self.dropout == 0.0 and kernels.varlen_fits(query, value)


def _attend_documents(documents: Documents, query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
    """Compute attention within documents with the fastest implementation.

    Shapes: query (1, heads, N, size) -> (1, N, heads, size).
    """
    if query.is_cuda and options.fits_kernel(query, value):
        return _by_kernel(query[0], key[0], value[0], documents.ragged(query.device), options)[None]
    return _by_lengths(query, key, value, documents, options)


@torch.compiler.disable
def _by_lengths(query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: _Options) -> Tensor:
    """Compute attention with the CPU kernel or one call per document: (1, heads, N, size) -> (1, N, heads, size).

    Compiled blocks exclude this function, because its loops over documents would be compiled again for each row.
    """
    if query.device.type == "cpu" and options.softcap is None and not options.dropout:
        scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
        row = query[0], key[0], value[0]
        out = kernels.ragged_attention(*row, documents.families, scale=scale, window=options.window)
        if out is not None:  # None: the kernel does not support these tensors
            return out[None]
    return _one_by_one(query, key, value, documents, options)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: _Options) -> Tensor:
    """Compute attention with one call per document: (1, heads, N, size) -> (1, N, heads, size).

    `split` and `cat` handle the full row once. With slices, each document would produce a gradient as long as the row.
    """
    lengths = list(documents.lengths)
    queries, keys, values = (t.split(lengths, dim=2) for t in (query, key, value))
    out = []
    for index in range(len(lengths)):
        prefix = documents.prefix(index)
        keys_and_values = (keys[index], values[index])
        if prefix is not None:
            keys_and_values = (
                torch.cat([keys[prefix], keys_and_values[0]], dim=2),
                torch.cat([values[prefix], keys_and_values[1]], dim=2),
            )
        out.append(options.attend(queries[index], *keys_and_values).transpose(1, 2))
    return torch.cat(out, dim=1)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged, options: _Options) -> Tensor:
    """Compute attention of all documents with one call of the variable-length kernel.

    Shapes: query (heads, N, size) -> (N, heads, size). Attention is causal: the last query and the last key of a
    document are the same token.
    """
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    if ragged.keys is not None:
        k, v = k.index_select(0, ragged.keys), v.index_select(0, ragged.keys)
    starts, longest = (ragged.query_starts, ragged.key_starts), (ragged.longest_query, ragged.longest_key)
    return kernels.within_sequences(q, k, v, starts, longest, scale=options.scaling, window=options.window)


AttentionInterface.register(NAME, document_attention)
