"""The two modules that are trained: a language model that scores tokens, and a model that values every position.

Sequences start at column 0 and are padded on the right, so causal attention never sees padding and no mask is needed;
positions count from 0. In packed rows `document_ids` keep documents apart.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine import token_logprobs


class Policy(nn.Module):
    """A causal language model whose forward gives log-probabilities of tokens instead of logits."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        text = lm.config.get_text_config()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        # Set by `checks.verify` where head(hidden) is not what the model's own forward gives.
        self.use_logits = False

    def forward(
        self,
        input_ids: Tensor,
        score_mask: Tensor,
        *,
        temperature: float = 1.0,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (N,) fp32 each, of the N tokens that `score_mask` marks, in row-major order.

        input_ids: (B, T); score_mask: (B, T), never True at the first column; temperature divides the logits.
        """
        inputs = self._inputs(input_ids, position_ids, document_ids)
        keep = score_mask[:, 1:]
        targets = input_ids[:, 1:][keep]
        if self.use_logits:
            logits = self.lm(**inputs, use_cache=False).logits[:, :-1][keep]
            logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy
        hidden = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
        head = cast(nn.Linear, self.lm.get_output_embeddings())
        return token_logprobs(
            hidden[:, :-1][keep], head.weight, targets, temperature=temperature, bias=head.bias, softcap=self.softcap
        )

    def _inputs(
        self, input_ids: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> dict[str, Tensor]:
        if document_ids is None:
            return {"input_ids": input_ids}
        assert position_ids is not None
        mask = document_mask(document_ids)
        if self.lm.config._attn_implementation == "eager":  # it adds the mask to the scores
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
        return {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask}


class Scorer(nn.Module):
    """A model with one label per position: the reward model reads the last token's, the critic every one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) token ids -> (B, T) fp32 values; position t has seen tokens 0..t."""
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = cast(nn.Linear, self.model.score)
        # fp32: a bf16 score has three digits, too few for the difference of two.
        values = F.linear(hidden.float(), head.weight.float())
        return values.squeeze(-1).clone()  # FSDP2 hooks on the output: it must not be a view


def document_mask(document_ids: Tensor) -> Tensor:
    """(B, T) document ids -> (B, 1, T, T) bool: True where a token may look: backwards, within its own document.

    Padding (-1) looks at padding, so that no row of the mask is empty.
    """
    same = document_ids[:, :, None] == document_ids[:, None, :]
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]
