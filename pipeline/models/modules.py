"""The two modules that are trained: a language model that scores tokens, and a model that values every position.

Sequences start at column 0 and are padded on the right, so causal attention never sees padding and no mask is needed;
positions count from 0. Or all sequences stand in one row without padding, and `documents` says where each lies; where
`packs` is False the model does not take that.
"""

from typing import Any, cast

from torch import Tensor, log_softmax, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine import token_logprobs
from pipeline.data.documents import Documents
from pipeline.models.attention import NAME


class Policy(nn.Module):
    """A causal language model whose forward gives log-probabilities of tokens instead of logits."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        text = lm.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        # Set by `checks.verify` where head(hidden) is not what the model's own forward gives.
        self.use_logits = False
        self.packs = False  # set by `checks`

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
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (N,) fp32 each, of some tokens, each predicted from the one before it.

        input_ids: (B, T); scored (N,): where the tokens are in the flattened ids, never at the first column, nor at a
        document's first token; temperature divides the logits.
        """
        inputs = _inputs(self.lm, input_ids, documents)
        targets, seen = input_ids.flatten()[scored], scored - 1
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


class Scorer(nn.Module):
    """A model with one label per position: the reward model reads the last token's, the critic every one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.packs = False  # set by `checks`

    @property
    def backbone(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self.model

    def forward(self, input_ids: Tensor, *, documents: Documents | None = None) -> Tensor:
        """(B, T) token ids -> (B, T) fp32 values; position t has seen tokens 0..t of its row or document."""
        hidden = self.model.base_model(**_inputs(self.model, input_ids, documents), use_cache=False).last_hidden_state
        head = cast(nn.Linear, self.model.score)
        # fp32: a bf16 score has three digits, too few for the difference of two.
        values = F.linear(hidden.float(), head.weight.float())
        return values.squeeze(-1).clone()  # FSDP2 hooks on the output: it must not be a view


def _inputs(model: PreTrainedModel, input_ids: Tensor, documents: Documents | None) -> dict[str, Any]:
    if documents is None:
        return {"input_ids": input_ids}
    assert model.config._attn_implementation == NAME, "this model has not been found to take documents (checks.verify)"
    positions = documents.positions(input_ids.device)
    return {"input_ids": input_ids, "position_ids": positions, "documents": documents}
