"""The loss of SFT: cross-entropy of the target tokens."""

from torch import Tensor


def sft_loss(logprobs: Tensor) -> Tensor:
    """Return the negative sum of the log-probabilities (N,) fp32 of the target tokens."""
    return -logprobs.sum()
