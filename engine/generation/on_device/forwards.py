"""The forward of a static step: the model's own modules, with attention over the slot caches."""

import torch
from torch import Tensor, nn

from engine.generation.attention import routed
from engine.generation.on_device.attention import NAME, Queries


class Forwards:
    """Called with token ids (1, b), positions (1, b) and the queries of attention; returns logits (1, b, V)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, positions: Tensor, queries: Queries) -> Tensor:
        with routed(self.module, NAME):
            output = self.module(input_ids=token_ids, position_ids=positions, use_cache=False, slots=queries)
        logits: Tensor = output.logits
        return logits
