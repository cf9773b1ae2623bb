"""The losses of preference optimization. Each loss returns a sum: over B pairs, or over B labelled answers (KTO).

An answer y to a prompt x has a score (M,) fp32, from its log-probability summed over its tokens, the same under the
reference, and its length. `chosen` and `rejected` are the scores of both answers of each pair, (B,) fp32. The margin of
a pair is their difference.

`LOSSES` lists the score and the loss of each method.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def log_ratios(logprobs: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """Return log pi(y | x) - log pi_ref(y | x) (Rafailov et al., 2023, arXiv:2305.18290)."""
    return logprobs - reference


def mean_log_ratios(logprobs: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """Return (log pi(y | x) - log pi_ref(y | x)) / |y| (Tulu 3; Lambert et al., 2024, arXiv:2411.15124)."""
    return (logprobs - reference) / lengths


def mean_logprobs(logprobs: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """Return log pi(y | x) / |y|, without the reference (Meng et al., 2024, arXiv:2405.14734, equation 4)."""
    return logprobs / lengths


def log_odds(logprobs: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """Return log(p / (1 - p)) with p = exp(log pi(y | x) / |y|) (Hong et al., 2024, arXiv:2403.07691, equation 4).

    log p is at most -1e-6, so that the odds stay finite. The reference is not used.
    """
    mean = (logprobs / lengths).clamp(max=-1e-6)
    return mean - torch.log(-torch.expm1(mean))


def sigmoid_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the sum of -log sigmoid(beta * margin) (Rafailov et al., 2023, arXiv:2305.18290, equation 7).

    label_smoothing: probability that a label is wrong (Mitchell, 2023, "A note on DPO with noisy preferences")
    """
    rewards = beta * (chosen - rejected)
    correct, flipped = F.logsigmoid(rewards), F.logsigmoid(-rewards)
    return -((1.0 - label_smoothing) * correct + label_smoothing * flipped).sum()


def robust_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the sum of ((1 - e) L - e L') / (1 - 2 e) (robust DPO; Chowdhury et al., 2024, arXiv:2403.00409).

    L is -log sigmoid(beta * margin), L' is the same with exchanged answers, and e is `label_smoothing`, the probability
    that a label is wrong. The mean over random wrong labels is the loss L of the correct labels. The loss has no lower
    bound.
    """
    rewards = beta * (chosen - rejected)
    correct, flipped = F.logsigmoid(rewards), F.logsigmoid(-rewards)
    return -((1.0 - label_smoothing) * correct - label_smoothing * flipped).sum() / (1.0 - 2.0 * label_smoothing)


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the sum of 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected).

    One term raises the chosen answer, the other lowers the rejected answer, each compared with the reference (APO-zero;
    D'Oosterlinck et al., 2024, arXiv:2408.06266, equation 7).
    """
    return (torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)).sum()


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the sum of (margin - 1 / (2 beta))^2 (Azar et al., 2023, arXiv:2310.12036, equation 17; beta is tau)."""
    return (chosen - rejected - 0.5 / beta).square().sum()


def simpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, margin: float) -> Tensor:
    """Return the sum of -log sigmoid(beta * (chosen - rejected) - margin) (Meng et al., 2024, arXiv:2405.14734, eq. 6).

    margin: the difference of rewards that a pair should exceed, gamma in the paper
    """
    return -F.logsigmoid(beta * (chosen - rejected) - margin).sum()


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the sum of -beta * log sigmoid(margin) (Hong et al., 2024, arXiv:2403.07691, equation 7; beta is lambda).

    The full loss of ORPO adds `imitation_loss` (equation 6).
    """
    return -beta * F.logsigmoid(chosen - rejected).sum()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[..., Tensor], tuple[str, ...]]] = {
    "sigmoid": (log_ratios, sigmoid_loss, ("beta", "label_smoothing")),
    "robust": (log_ratios, robust_loss, ("beta", "label_smoothing")),
    "apo_zero": (log_ratios, apo_zero_loss, ("beta",)),
    "ipo": (log_ratios, ipo_loss, ("beta",)),
    "length_normalized": (mean_log_ratios, sigmoid_loss, ("beta", "label_smoothing")),
    "simpo": (mean_logprobs, simpo_loss, ("beta", "margin")),
    "orpo": (log_odds, orpo_loss, ("beta",)),
}
"""The score of an answer and the loss of a pair by the value of `dpo.loss`, with the keys of `dpo` that the loss takes.

KTO has no pairs and is not in this table.
"""


def imitation_loss(logprobs: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of -log pi(y | x) / |y| over the chosen answers (Pang et al., 2024, arXiv:2404.19733).

    logprobs (B,): log pi(y | x) of each chosen answer
    lengths (B,): |y|, the number of tokens of each chosen answer
    """
    return -(logprobs / lengths).sum()


def kto_baseline(log_ratios: Tensor) -> Tensor:
    """Return the estimate of KL(pi, pi_ref), at least 0, from which KTO measures rewards: the mean log-ratio, ().

    log_ratios (B,): of answers to other prompts (Ethayarajh et al., 2024, arXiv:2402.01306)
    """
    return log_ratios.mean().clamp(min=0.0)


def kto_loss(
    log_ratios: Tensor, labels: Tensor, baseline: Tensor | float, *, beta: float, undesirable_weight: float
) -> Tensor:
    """Return the sum of weight * (1 - v) (Ethayarajh et al., 2024, arXiv:2402.01306).

        v = sigmoid(beta * (log-ratio - baseline)) if the answer is desirable, sigmoid(beta * (baseline - log-ratio))
        if not; the weight is 1 if the answer is desirable, and `undesirable_weight` if not

    labels (B,) bool: whether the answer is desirable
    baseline: without a gradient, see `kto_baseline`
    """
    gain = torch.where(labels, log_ratios - baseline, baseline - log_ratios)
    weights = torch.where(labels, 1.0, undesirable_weight)
    return (weights * (1.0 - torch.sigmoid(beta * gain))).sum()
