"""Decoding in batches of prompts of one length: for models that can't be told of padding, or of positions.

Nothing is told them but tokens. With the cache that the model makes for itself a step runs one token a row; a model
without one runs whole sequences each time, as it does in training.
"""

from typing import Any

import torch
from torch import Tensor

from engine.generation.attention import Unserved
from engine.generation.batches.batch_decoding import BatchDecoding

CACHES = ("past_key_values", "cache_params", "state")  # what families call what they keep between tokens


class OwnCacheDecoding(BatchDecoding):
    """For models that take back what they computed, under one name or another."""

    name, manner, alike = "own cache", "in batches of prompts of one length, more slowly", True

    def prepare(self) -> None:
        found = next((name for name in CACHES if name in self.accepts), None)
        if found is None:
            raise Unserved("it keeps nothing between tokens")
        self.keeps, self.kept = found, None

    def begin(self) -> Tensor:
        return self._run(self.prompt_ids)

    def go_on(self, tokens: Tensor, step: int) -> Tensor:
        return self._run(tokens, **{self.keeps: self.kept})

    def _run(self, token_ids: Tensor, **kept: Any) -> Tensor:
        logits, output = self._last(input_ids=token_ids, use_cache=True, **kept)
        self.kept = getattr(output, self.keeps, None)
        if self.kept is None:
            raise Unserved("it hands out nothing to keep")
        return logits

    def _keep(self, live: Tensor) -> bool:
        return False


class WholeDecoding(BatchDecoding):
    """The plain forward over all tokens so far, for each new one."""

    name, manner, alike = "whole", "by running whole sequences for each token, many times more slowly", True

    def begin(self) -> Tensor:
        self.token_ids = self.prompt_ids
        return self._last(input_ids=self.token_ids, use_cache=False)[0]

    def go_on(self, tokens: Tensor, step: int) -> Tensor:
        self.token_ids = torch.cat([self.token_ids, tokens], dim=1)
        return self._last(input_ids=self.token_ids, use_cache=False)[0]

    def _keep(self, live: Tensor) -> bool:
        self.token_ids = self.token_ids[live]
        return True
