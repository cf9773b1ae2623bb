"""Run the SFT stage with a simulated out-of-memory error on rank 1. `tests/test_out_of_memory.py` starts this module.

Embedding lookups of more than FAILING_ABOVE tokens fail. The first FAILING_AFTER of these lookups still pass.
"""

import os

import torch
from torch import Tensor, nn

from pipeline.launch.worker import stage_main

large_lookups = 0


def fail_when_large(forward):
    def embedding(self: nn.Embedding, ids: Tensor) -> Tensor:
        global large_lookups
        if torch.is_grad_enabled() and not ids.is_meta and ids.numel() > int(os.environ["FAILING_ABOVE"]):
            large_lookups += 1
            if large_lookups > int(os.environ["FAILING_AFTER"]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return forward(self, ids)

    return embedding


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        nn.Embedding.forward = fail_when_large(nn.Embedding.forward)  # type: ignore[method-assign]
    stage_main("sft", "step1_sft.train")
