"""The two modules that are trained: a language model that scores tokens, and a model that values every position.

Sequences start at column 0 and are padded on the right, so causal attention never sees padding and no mask is needed;
positions count from 0. Or all sequences stand in one row without padding, and `documents` says where each lies; where
`packs` is False the model does not take that. Ranks of a sequence group each compute a share of such a row, and all
have the whole result.
"""

from typing import Any, Self, cast

import torch
from torch import Tensor, log_softmax, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine import distributed, token_logprobs
from pipeline.data.documents import Documents
from pipeline.models.attention import NAME


class _Backed(nn.Module):
    """A transformers model inside, and how it has to be run; `checks.verify` finds that out."""

    packs = False  # whether it takes documents
    steady = False  # whether it computes otherwise in training than in evaluation, and so always does as in the latter

    def train(self, mode: bool = True) -> Self:
        """Dropout and the like on or off; a model whose training mode is another model stays in evaluation mode."""
        return super().train(mode and not self.steady)


class Policy(_Backed):
    """A causal language model whose forward gives log-probabilities of tokens instead of logits."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        text = lm.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.use_logits = False  # set by `checks.verify` where head(hidden) is not what the model's own forward gives

    @property
    def backbone(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self.lm

    def forward(
        self,
        input_ids: Tensor,
        scored: Tensor,
        *,
        temperature: float = 1.0,
        documents: Documents | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (N,) fp32 each, of some tokens, each predicted from the one before it.

        input_ids: (B, T); scored (N,): where the tokens are in the flattened ids, never at the first column, nor at a
        document's first token; temperature divides the logits; positions (B, T) are told to the model where given.
        """
        targets, seen = input_ids.flatten()[scored], scored - 1
        share = _share(input_ids, documents)
        inputs = _inputs(self.lm, input_ids, documents, share, positions)
        if share is None:
            return self._scored(inputs, targets, seen, temperature)
        mine = share.local_indices(seen)
        logprobs, entropies = self._scored(inputs, targets[mine], seen[mine] - share.first, temperature)
        return share.gather_scores(logprobs, mine, len(scored)), share.gather_scores(entropies, mine, len(scored))

    def _scored(
        self, inputs: dict[str, Any], targets: Tensor, seen: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Of `targets` (N,), each predicted at the place `seen` (N,) in the flattened inputs."""
        if self.use_logits:
            logits = self.lm(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, seen)
            logprobs = log_softmax(logits.float() / temperature, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
        hidden = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
        head = cast(nn.Linear, self.lm.get_output_embeddings())
        return token_logprobs(
            hidden.flatten(0, 1).index_select(0, seen),
            head.weight,
            targets,
            temperature=temperature,
            bias=head.bias,
            softcap=self.softcap,
        )


class Scorer(_Backed):
    """A model with one label per position: the reward model reads the last token's, the critic every one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def backbone(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self.model

    def forward(
        self,
        input_ids: Tensor,
        *,
        documents: Documents | None = None,
        positions: Tensor | None = None,
        head: Tensor | None = None,
    ) -> Tensor:
        """(B, T) token ids -> (B, T) fp32 values; position t has seen tokens 0..t of its row or document.

        positions (B, T) are told to the model, and head (D,) stands in for the model's own, where given.
        """
        share = _share(input_ids, documents)
        inputs = _inputs(self.model, input_ids, documents, share, positions)
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        weight = cast(nn.Linear, self.model.score).weight if head is None else head[None]
        # fp32: a bf16 score has three digits, too few for the difference of two.
        values = F.linear(hidden.float(), weight.float()).squeeze(-1)
        if share is not None:
            places = torch.arange(share.first, share.first + share.length, device=values.device)
            values = share.gather_scores(values[0], places, share.length * share.ranks)[None, : share.tokens]
        return values.clone()  # FSDP2 hooks on the output: it must not be a view


def _share(input_ids: Tensor, documents: Documents | None) -> distributed.SequenceShard | None:
    """This rank's share of a row; None where the rank computes all of it."""
    if documents is not None:
        return distributed.sequence_shard(input_ids.shape[1])
    assert distributed.world().sequence == 1 or not torch.is_grad_enabled(), "only rows of documents are shared out"
    return None


def _inputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    documents: Documents | None,
    share: distributed.SequenceShard | None,
    positions: Tensor | None,
) -> dict[str, Any]:
    if documents is None:
        return {"input_ids": input_ids} | ({} if positions is None else {"position_ids": positions})
    assert model.config._attn_implementation == NAME, "this model has not been found to take documents (checks.verify)"
    return packed_inputs(input_ids, documents, share)


def packed_inputs(input_ids: Tensor, documents: Documents, share: distributed.SequenceShard | None) -> dict[str, Any]:
    """What the backbone takes of a row of documents (1, N), or of this rank's share of it."""
    if share is None:
        positions = documents.positions(input_ids.device)
        _lay_out(documents, input_ids.device)
        return {"input_ids": input_ids, "position_ids": positions, "documents": documents}
    documents = documents.filled(share.padding)
    positions = documents.positions(input_ids.device).narrow(1, share.first, share.length)
    _lay_out(documents, input_ids.device)
    return {
        "input_ids": share.local_tokens(input_ids),
        "position_ids": positions,
        "documents": documents,
        "share": share,
    }


def _lay_out(documents: Documents, device: torch.device) -> None:
    """Make what the kernel of GPUs asks for now: the first layer that does may be in compiled code."""
    if device.type == "cuda":
        documents.ragged(device)
