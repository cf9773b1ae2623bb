"""The loss of SFT: cross-entropy of the tokens that count."""

from torch import Tensor


def sft_loss(logprobs: Tensor) -> Tensor:
    """(N,) fp32 log-probabilities of the tokens that count -> their negative sum."""
    return -logprobs.sum()
