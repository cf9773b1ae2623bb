"""The loss of the reward model: Bradley-Terry on the last token's scores (Ouyang et al., 2022, equation 1)."""

from torch import Tensor
from torch.nn import functional as F


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, *, centering: float) -> Tensor:
    """Return the sum over pairs of -log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2.

    chosen, rejected, margins: (B,) fp32. The first term depends only on differences of scores. The second term moves
    their mean to 0 (Eisenstein et al., 2023, arXiv:2312.09244).
    """
    ranking = -F.logsigmoid(chosen - rejected - margins)
    return (ranking + centering * (chosen + rejected).square()).sum()
