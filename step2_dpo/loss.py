"""The losses of direct preference optimisation over pairs, (B,) fp32 each; sums over pairs.

A pair's lead is by how much more the policy than the reference prefers the chosen answer: the difference of both
answers' log-ratios, log pi(y | x) - log pi_ref(y | x), each the sum over an answer's tokens.
"""

from torch import Tensor
from torch.nn import functional as F


def sigmoid_loss(leads: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """-log sigmoid(beta * lead) (Rafailov et al., 2023, arXiv:2305.18290, equation 7); of a share `label_smoothing` of
    the pairs the other answer is taken to be the better one (Mitchell, 2023, "A note on DPO with noisy preferences").
    """
    right, wrong = F.logsigmoid(beta * leads), F.logsigmoid(-beta * leads)
    return -((1.0 - label_smoothing) * right + label_smoothing * wrong).sum()


def ipo_loss(leads: Tensor, *, beta: float) -> Tensor:
    """(lead - 1 / (2 beta))^2 (Azar et al., 2023, arXiv:2310.12036, equation 17, where beta is tau)."""
    return (leads - 0.5 / beta).square().sum()


def imitation_loss(logprobs: Tensor, lengths: Tensor) -> Tensor:
    """-log pi(y | x) / |y| of the chosen answers, |y| their lengths (B,) (Pang et al., 2024, arXiv:2404.19733)."""
    return -(logprobs / lengths).sum()
