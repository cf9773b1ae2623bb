"""Whether a recording says what the module says."""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest logit


def disagreement(right: Tensor, replayed: Tensor) -> str | None:
    """Why a replay is not to be used whose logits should be `right`; None where they agree but for rounding."""
    off = (replayed.float() - right.float()).abs().max()
    if bool(off <= TOLERANCE.get(right.dtype, 5e-2) * right.abs().max()):
        return None
    return f"its calls depend on the tokens: logits differ by {off:.2g}"
