"""The losses of direct preference optimisation. Each function returns the sum over B pairs.

The log-ratio of an answer is log pi(y | x) - log pi_ref(y | x), summed over the tokens of the answer. The margin of a
pair is the log-ratio of the chosen answer minus the log-ratio of the rejected answer. `margins` is (B,) fp32.
"""

from torch import Tensor
from torch.nn import functional as F


def sigmoid_loss(margins: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the sum of -log sigmoid(beta * margin) (Rafailov et al., 2023, arXiv:2305.18290, equation 7).

    label_smoothing: probability that a label is wrong (Mitchell, 2023, "A note on DPO with noisy preferences")
    """
    correct, flipped = F.logsigmoid(beta * margins), F.logsigmoid(-beta * margins)
    return -((1.0 - label_smoothing) * correct + label_smoothing * flipped).sum()


def ipo_loss(margins: Tensor, *, beta: float) -> Tensor:
    """Return the sum of (margin - 1 / (2 beta))^2 (Azar et al., 2023, arXiv:2310.12036, equation 17; beta is tau)."""
    return (margins - 0.5 / beta).square().sum()


def imitation_loss(logprobs: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of -log pi(y | x) / |y| over the chosen answers (Pang et al., 2024, arXiv:2404.19733).

    logprobs (B,): log pi(y | x) of each chosen answer
    lengths (B,): |y|, the number of tokens of each chosen answer
    """
    return -(logprobs / lengths).sum()
