"""The SFT stage with a rank that runs out of memory: embeddings of more than FAILING_ABOVE tokens fail on rank 1.

FAILING_AFTER such forwards with gradients pass before. `tests/test_out_of_memory.py` starts it as a worker.
"""

import os

import torch
from torch import Tensor, nn

from pipeline.launch import stage_main

passed = 0


def fail_when_large(forward):
    def embedding(self: nn.Embedding, ids: Tensor) -> Tensor:
        global passed
        if torch.is_grad_enabled() and ids.numel() > int(os.environ["FAILING_ABOVE"]):
            passed += 1
            if passed > int(os.environ["FAILING_AFTER"]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return forward(self, ids)

    return embedding


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        nn.Embedding.forward = fail_when_large(nn.Embedding.forward)  # type: ignore[method-assign]
    stage_main("sft", "step1_sft.train")
