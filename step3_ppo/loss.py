"""The clipped losses of PPO (Schulman et al., 2017, arXiv:1707.06347, equation 7) over flat tokens, (N,) fp32 each.

Each function returns a sum over tokens; the engine divides it by the global count.
"""

import torch
from torch import Tensor

Sums = dict[str, float | Tensor]


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return log(pi / pi_old), clamped to +-20 so that its exponential stays finite."""
    return (logprobs - old).clamp(-20.0, 20.0)


def importance_weights(old: Tensor, generator: Tensor, cap: float) -> tuple[Tensor, Sums]:
    """Return min(pi_old / pi_generator, cap) of each token, without a gradient, and metrics.

    The weights correct for rounding differences between the generator, which samples the tokens, and the trainer (Yao
    et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"). They are truncated as in
    Espeholt et al., 2018, arXiv:1802.01561, equation 1.
    """
    with torch.no_grad():
        weights = log_ratio(old, generator).exp()
        cut = weights > cap
        weights = weights.clamp(max=cap)
        return weights, {"importance_weight": weights.sum(), "importance_truncated": cut.sum()}


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None,
    weights: Tensor | float = 1.0,
) -> tuple[Tensor, Sums]:
    """Return the sum of max(-A r, -A clip(r, 1 - clip, 1 + clip)), and metrics.

    clip_high: replaces `clip` in the upper bound (Yu et al., 2025, arXiv:2503.14476, section 3.1)
    dual_clip: for A < 0 the loss of a token is at most -A * dual_clip (Ye et al., 2020, equation 5)
    weights: (N,) factors of the losses of the tokens
    """
    logs = log_ratio(logprobs, old)
    ratio, high = logs.exp(), clip if clip_high is None else clip_high
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    with torch.no_grad():
        sums: Sums = {
            "clip_fraction": (clipped > plain).sum(),
            "approx_kl": (ratio - 1.0 - logs).sum(),
            "ratio": ratio.sum(),
        }
    return (weights * loss).sum(), sums


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Sums]:
    """Return the sum of 1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2), and metrics."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain.sum(), {"value_clip_fraction": 0.0}
    clipped = (values.clamp(old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped).sum(), {"value_clip_fraction": (clipped > plain).detach().sum()}
