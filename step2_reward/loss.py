"""The loss of the reward model: Bradley-Terry on the last token's scores (Ouyang et al., 2022, equation 1)."""

from torch import Tensor
from torch.nn import functional as F


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, *, centering: float) -> Tensor:
    """Sum over pairs of -log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2.

    chosen, rejected, margins: (B,) fp32. Only differences are learned from pairs; the second term fixes the level
    near 0 (Eisenstein et al., 2023, arXiv:2312.09244).
    """
    ranking = -F.logsigmoid(chosen - rejected - margins)
    return (ranking + centering * (chosen + rejected).square()).sum()


def last_scores(values: Tensor, ends: Tensor) -> Tensor:
    """(B, T) values and (S,) places in them, flattened -> (S,) the values there."""
    return values.flatten()[ends]
