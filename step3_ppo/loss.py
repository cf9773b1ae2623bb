"""The losses of the policy (`POLICY_LOSSES`) and of the critic over flat tokens, (N,) fp32 each.

Each function returns a sum over tokens; the engine divides it by the global count.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Sums = dict[str, float | Tensor]
LogRatio = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities, old log-probabilities), (N,) each -> log-ratios (N,)."""
Importance = Callable[[Tensor, Tensor, float], tuple[Tensor, Sums]]
"""(old log-probabilities, those of the generator, cap) -> weights (N,), and metrics."""


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return log(pi / pi_old), clamped to +-20 so that its exponential stays finite."""
    return (logprobs - old).clamp(-20.0, 20.0)


def sequence_log_ratio(logprobs: Tensor, old: Tensor, *, lengths: Sequence[int]) -> Tensor:
    """Return at each token the mean of log(pi / pi_old) over its sequence, clamped to +-20.

    Its exponential is the sequence-level ratio of GSPO (Zheng et al., 2025, arXiv:2507.18071, equation 7).
    lengths: the number of tokens of each sequence, in the order of the tokens
    """
    return _at_each_token(Tensor.mean, logprobs - old, lengths).clamp(-20.0, 20.0)


def summed_log_ratio(logprobs: Tensor, old: Tensor, *, lengths: Sequence[int]) -> Tensor:
    """Return at each token the sum of log(pi / pi_old) over its sequence, clamped to +-20.

    lengths: the number of tokens of each sequence, in the order of the tokens
    """
    return _at_each_token(Tensor.sum, logprobs - old, lengths).clamp(-20.0, 20.0)


def _at_each_token(reduce: Callable[[Tensor], Tensor], values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Reduce the values (N,) of each sequence, and return the result at each of its tokens, (N,)."""
    parts = values.split(list(lengths)) if lengths else []
    return torch.cat([values[:0], *(reduce(part).expand(len(part)) for part in parts)])


def ratio_of(level: str, lengths: Sequence[int]) -> LogRatio:
    """Return the log-ratio that `ppo.ratio` names: of each token ("token") or of each sequence ("sequence")."""
    levels: dict[str, LogRatio] = {"token": log_ratio, "sequence": partial(sequence_log_ratio, lengths=lengths)}
    return levels[level]


def equal_sequences(lengths: Sequence[int], *, tokens: int, sequences: int) -> Tensor:
    """Return the weight (N,) of each token with which a mean over `tokens` is the mean over `sequences`.

    Each sequence then has the same weight, and each token the share 1 / length of it (Zheng et al., 2025, equation 5).
    """
    weights = [torch.full((length,), tokens / (sequences * length)) for length in lengths]
    return torch.cat([torch.empty(0), *weights])


def truncate(weights: Tensor, cap: float) -> Tensor:
    """Return min(weight, cap) (Espeholt et al., 2018, arXiv:1802.01561, equation 1)."""
    return weights.clamp(max=cap)


def mask_above(weights: Tensor, cap: float) -> Tensor:
    """Return the weights, with 0 for those above `cap`: such tokens do not count in the loss."""
    return torch.where(weights > cap, 0.0, weights)


def importance_weights(
    old: Tensor,
    generator: Tensor,
    cap: float,
    *,
    ratio: LogRatio = log_ratio,
    cut: Callable[[Tensor, float], Tensor] = truncate,
) -> tuple[Tensor, Sums]:
    """Return pi_old / pi_generator of each token, cut at `cap`, without a gradient, and metrics.

    The weights correct for rounding differences between the generator, which samples the tokens, and the trainer (Yao
    et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training").

    ratio: `log_ratio` for a weight of each token, `summed_log_ratio` for one of each sequence
    cut: `truncate` or `mask_above`
    """
    with torch.no_grad():
        ratios = ratio(old, generator).exp()
        weights = cut(ratios, cap)
        return weights, {"importance_weight": weights.sum(), "importance_truncated": (ratios > cap).sum()}


def importance_of(kind: str, lengths: Sequence[int]) -> Importance:
    """Return the importance weights that `ppo.importance_weights` names."""
    of_sequence = partial(summed_log_ratio, lengths=lengths)
    kinds: dict[str, Importance] = {
        "token": importance_weights,
        "token_mask": partial(importance_weights, cut=mask_above),
        "sequence": partial(importance_weights, ratio=of_sequence),
        "sequence_mask": partial(importance_weights, ratio=of_sequence, cut=mask_above),
    }
    return kinds[kind]


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None,
    weights: Tensor | float = 1.0,
    ratio: LogRatio = log_ratio,
) -> tuple[Tensor, Sums]:
    """Return the sum of max(-A r, -A clip(r, 1 - clip, 1 + clip)), and metrics (Schulman et al., 2017, equation 7).

    clip_high: replaces `clip` in the upper bound (Yu et al., 2025, arXiv:2503.14476, section 3.1)
    dual_clip: for A < 0 the loss of a token is at most -A * dual_clip (Ye et al., 2020, equation 5)
    weights: (N,) factors of the losses of the tokens
    ratio: the logarithm of r: `log_ratio` of each token, or `sequence_log_ratio` of each sequence
    """
    logs = ratio(logprobs, old)
    ratios, high = logs.exp(), clip if clip_high is None else clip_high
    plain, clipped = -advantages * ratios, -advantages * ratios.clamp(1.0 - clip, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return (weights * loss).sum(), _ratio_sums(logs, clipped > plain, logprobs, old)


def cispo_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    weights: Tensor | float = 1.0,
    ratio: LogRatio = log_ratio,
) -> tuple[Tensor, Sums]:
    """Return the sum of -sg(clip(r, 1 - clip, 1 + clip)) A log pi, and metrics; sg stops the gradient.

    The gradient of each token is that of A log pi, times the clipped ratio. A token outside of the range keeps its
    gradient, which `policy_loss` sets to 0 (CISPO; MiniMax, 2025, arXiv:2506.13585, equations 4 and 5). The arguments
    are those of `policy_loss`; a `clip` of 1 or more sets no lower bound.
    """
    with torch.no_grad():
        logs = ratio(logprobs, old)
        ratios, high = logs.exp(), clip if clip_high is None else clip_high
        clipped = ratios.clamp(1.0 - clip, 1.0 + high)
    loss = (weights * -clipped * advantages * logprobs).sum()
    return loss, _ratio_sums(logs, clipped != ratios, logprobs, old)


POLICY_LOSSES: dict[str, tuple[Callable[..., tuple[Tensor, Sums]], tuple[str, ...]]] = {
    "clip": (policy_loss, ("clip", "clip_high", "dual_clip")),
    "cispo": (cispo_loss, ("clip", "clip_high")),
}
"""The losses by the value of `ppo.loss`, with the keys of `ppo` that they take."""


def _ratio_sums(logs: Tensor, clipped: Tensor, logprobs: Tensor, old: Tensor) -> Sums:
    """Return the metrics of log-ratios (N,), and the number of tokens that were `clipped`, (N,) bool.

    The KL is that of the tokens: k3 of the mean log-ratio of a sequence would be about KL^2 / 2.
    """
    with torch.no_grad():
        by_token = log_ratio(logprobs, old)
        kl = (by_token.exp() - 1.0 - by_token).sum()
        return {"clip_fraction": clipped.sum(), "approx_kl": kl, "ratio": logs.exp().sum()}


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Sums]:
    """Return the sum of 1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2), and metrics."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain.sum(), {"value_clip_fraction": 0.0}
    clipped = (values.clamp(old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped).sum(), {"value_clip_fraction": (clipped > plain).detach().sum()}
