"""The two trained modules: a language model that scores tokens, and a model with a value for each position.

Sequences have one of two layouts:

- Padded rows: sequences start at column 0, and padding follows them. Causal attention never sees the padding, so no
  mask is needed. Positions count from 0.
- One packed row without padding: `documents` divides the row into sequences. A module with `packs` = False does not
  support this layout.

Each rank of a sequence group computes a shard of a packed row. All ranks return the full result.
"""

from typing import Any, Self, cast

import torch
from torch import Tensor, log_softmax, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine import attention, distributed, token_logprobs
from pipeline.data.batch import Documents
from pipeline.models.attention import NAME


class _ModelModule(nn.Module):
    """Base of the modules around a transformers model. `checks.verify` sets the attributes."""

    packs = False  # whether the model supports packed rows
    steady = False  # whether the module stays in evaluation mode, because training mode changes its numbers

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. A module with `steady` = True stays in evaluation mode."""
        return super().train(mode and not self.steady)


class Policy(_ModelModule):
    """A causal language model whose forward returns log-probabilities of tokens instead of logits."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        text = lm.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.use_logits = False  # set by `checks.verify` if the model's own logits differ from head(hidden)

    @property
    def backbone(self) -> PreTrainedModel:
        """Return the transformers model."""
        return self.lm

    def outer_layers(self) -> list[nn.Module | None]:
        """Return the layers that the engine may gather apart from the blocks: embedding and head."""
        return [self.lm.get_input_embeddings(), self.lm.get_output_embeddings()]

    def forward(
        self,
        input_ids: Tensor,
        scored: Tensor,
        *,
        temperature: float = 1.0,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and entropies of the scored tokens, (N,) fp32 each.

        Each token is predicted from the tokens before it in its row or document.

        input_ids: (B, T)
        scored: (N,) indices of the tokens in the flattened ids; never the first of a row or document
        temperature: the divisor of the logits
        """
        targets, predictors = input_ids.flatten()[scored], scored - 1
        share = _sequence_shard(input_ids, documents)
        inputs = _inputs(self.lm, input_ids, documents, share)
        if share is None:
            return self._scored(inputs, targets, predictors, temperature)
        local = share.local_indices(predictors)
        logprobs, entropies = self._scored(inputs, targets[local], predictors[local] - share.first, temperature)
        return share.gather_scores(logprobs, local, len(scored)), share.gather_scores(entropies, local, len(scored))

    def _scored(
        self, inputs: dict[str, Any], targets: Tensor, seen: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and entropies of `targets`, (N,) fp32 each.

        `seen` (N,) has the index in the flattened inputs of the token that predicts each target.
        """
        if self.use_logits:
            logits = self.lm(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, seen)
            logprobs = log_softmax(logits.float() / temperature, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
        hidden = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
        head = cast(nn.Linear, self.lm.get_output_embeddings())
        rows = hidden.flatten(0, 1).index_select(0, seen)
        return token_logprobs(rows, head, targets, temperature=temperature, softcap=self.softcap)


class Scorer(_ModelModule):
    """A model with one value per position.

    The reward model reads the value of the last token, and the critic reads the values of all tokens.

    The results are (value - shift) * scale. The two constants are not part of the exported model.
    """

    def __init__(self, model: PreTrainedModel, *, shift: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.model, self.shift, self.scale = model, shift, scale

    @property
    def backbone(self) -> PreTrainedModel:
        """Return the transformers model."""
        return self.model

    def outer_layers(self) -> list[nn.Module | None]:
        """Return the layer that the engine may gather apart from the blocks: the embedding."""
        return [self.model.get_input_embeddings()]

    def forward(
        self,
        input_ids: Tensor,
        *,
        documents: Documents | None = None,
        head: Tensor | None = None,
    ) -> Tensor:
        """Return the values of all positions, (B, T) fp32. Position t depends on tokens 0..t of its row or document.

        input_ids: (B, T)
        head: (D,) weights that replace the model's own head
        """
        share = _sequence_shard(input_ids, documents)
        inputs = _inputs(self.model, input_ids, documents, share)
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        weight = cast(nn.Linear, self.model.score).weight if head is None else head[None]
        # fp32: a bf16 score has fewer than three digits, too few for the difference of two scores.
        values = F.linear(hidden.float(), weight.float()).squeeze(-1)
        if share is not None:
            indices = torch.arange(share.first, share.first + share.length, device=values.device)
            values = share.gather_scores(values[0], indices, share.length * share.ranks)[None, : share.tokens]
        return (values - self.shift) * self.scale  # no view, because FSDP2 adds hooks to the output


def _sequence_shard(input_ids: Tensor, documents: Documents | None) -> distributed.SequenceShard | None:
    """Return this rank's shard of a packed row; None if the rank computes all tokens."""
    if distributed.world().sequence == 1:
        return None
    if documents is not None:
        return distributed.sequence_shard(input_ids.shape[1])
    assert not torch.is_grad_enabled(), "sequence parallelism trains only packed rows"
    return None


def _inputs(
    model: PreTrainedModel, input_ids: Tensor, documents: Documents | None, share: distributed.SequenceShard | None
) -> dict[str, Any]:
    """Return the keyword arguments of the backbone for padded rows or a packed row."""
    if documents is None:
        return {"input_ids": input_ids}  # the model chooses the positions
    assert attention.attention_name(model) == NAME, "packed rows need `checks.verify` to select document attention"
    return packed_inputs(input_ids, documents, share)


def packed_inputs(input_ids: Tensor, documents: Documents, share: distributed.SequenceShard | None) -> dict[str, Any]:
    """Return the keyword arguments of the backbone for a packed row (1, N), or for this rank's shard of it."""
    if share is not None:
        documents = documents.filled(share.padding)
    positions = documents.positions(input_ids.device)
    if input_ids.is_cuda:
        documents.ragged(input_ids.device)  # the first layer would create the kernel's input, maybe in compiled code
    if share is None:
        return {"input_ids": input_ids, "position_ids": positions, "documents": documents}
    return {
        "input_ids": share.local_tokens(input_ids),
        "position_ids": positions.narrow(1, share.first, share.length),
        "documents": documents,
        "share": share,
    }
