"""The settings of sampling, its random numbers, and the end of an answer.

`engine.kernels.sample` turns logits and random numbers into tokens. The random number for
the n-th token of a sequence is a hash of (seed, sample seed, n), a counter-based generator (Salmon et al., 2011,
"Parallel random numbers: as easy as 1, 2, 3"). A sampled token therefore depends only on the seed, the sample seed, the
position and the logits, not on its batch or on the device.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_DIVISOR = 1e-5  # smaller settings would overflow the logits or vanish in fp32, and make NaN
RawLogprobs = tuple[float, list[tuple[int, float]]]  # log-probability of the token; the likeliest tokens with theirs


class SampledToken(NamedTuple):
    """A sampled token of a request.

    logprob: under the distribution that the token was sampled from. finish: "stop" if the token ends the answer,
    "length" if the answer has its longest length, else None. raw: see `Sampling.top_logprobs`.
    """

    request: int
    token: int
    logprob: float
    finish: str | None = None
    raw: RawLogprobs | None = None


def check_logprobs(sampled: Sequence[SampledToken]) -> None:
    """Raise FloatingPointError if a log-probability is NaN."""
    if any(token.logprob != token.logprob for token in sampled):
        raise FloatingPointError("the logits of the model are NaN; its weights may have diverged")


@dataclass(frozen=True)
class Sampling:
    """The settings of sampling.

    `temperature` 0 selects the most probable token. `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing; `min_p` removes
    tokens with less than this share of the highest probability (Nguyen et al., 2024). `repetition_penalty` above 1
    makes the tokens of prompt and answer less probable (Keskar et al., 2019, "CTRL"); 1 changes nothing.
    An answer ends with the first of `end_ids` (included), with the token that completes one of the strings `stop`, or
    after `max_new_tokens`. No end token is sampled before the answer has `min_new_tokens` tokens.
    `top_logprobs` computes `raw_logprobs` of each token with this many of the likeliest tokens (`DecodeSession`).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()
    seed: int = 0
    min_new_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.temperature != 0 and not SMALLEST_DIVISOR <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or a number from {SMALLEST_DIVISOR:g}, not {self.temperature}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a positive number, not {self.top_k}")
        if not SMALLEST_DIVISOR <= self.top_p <= 1:
            raise ValueError(f"top_p must be a number from {SMALLEST_DIVISOR:g} to 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 (off) and 1, not {self.min_p}")
        largest = round(1 / SMALLEST_DIVISOR)
        if not SMALLEST_DIVISOR <= self.repetition_penalty <= largest:
            raise ValueError(
                f"repetition_penalty must be a number from {SMALLEST_DIVISOR:g} to {largest:g}, 1 for none, "
                f"not {self.repetition_penalty}"
            )
        if not all(self.stop):
            raise ValueError("stop must not hold the empty string: it would end every answer at once")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens must be between 0 and {self.max_new_tokens}, not {self.min_new_tokens}")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ValueError(f"top_logprobs must be None (off), 0 or a positive number, not {self.top_logprobs}")


def combine_seeds(seed: int, sample_seed: int) -> int:
    """Return the int64 that selects the random numbers of an answer, from the settings' seed and its sample seed."""
    of_settings = int(_mix(torch.tensor(_as_int64(seed))))
    return int(_mix(torch.tensor(_as_int64(sample_seed + of_settings))))


def uniforms(seeds: Tensor, position: int | Tensor) -> Tensor:
    """Return random numbers in [0, 1), fp32, the same on every device.

    seeds: results of `combine_seeds`, int64 of any shape. position: a number, or an int64 tensor that broadcasts
    against seeds, as the result does: seeds (B, 1) and positions (1, T) give (B, T).
    """
    bits = _mix(seeds + position)
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24  # the top 24 bits: exact in fp32


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return logits (B, V) fp32; those of tokens seen (B, V) are divided by `penalty` if positive, else multiplied."""
    logits = logits.float()
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def raw_logprobs(logits: Tensor, tokens: Tensor, count: int) -> list[RawLogprobs]:
    """Return each row's log-probability of its token, and its `count` likeliest tokens with their log-probabilities.

    logits: (B, V). tokens: (B,) int64. The distribution has temperature 1 and no filter or penalty.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    values, indices = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    likeliest = (list(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True))
    return list(zip(chosen, likeliest, strict=True))


@dataclass
class Ending:
    """Decide for each sampled token whether it ends its answer.

    `text` turns token ids into text; only stop strings need it.
    """

    sampling: Sampling
    text: Callable[[list[int]], str] | None = None
    _answers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sampling.stop and self.text is None:
            raise ValueError("stop strings need text=, a function that turns token ids into text")
        # A token is at least one byte. 8 more tokens, because the first ones may decode differently without their
        # predecessors.
        self._tail = max((len(stop.encode()) for stop in self.sampling.stop), default=0) + 8

    def __call__(self, answer: int, token: int) -> bool:
        return token in self.sampling.end_ids or self._stops(answer, token)

    def _stops(self, answer: int, token: int) -> bool:
        if self.text is None or not self.sampling.stop:
            return False
        token_ids = self._answers.setdefault(answer, [])
        token_ids.append(token)
        if len(token_ids) < self.sampling.min_new_tokens:
            return False
        before, after = self.text(token_ids[-self._tail : -1]), self.text(token_ids[-self._tail :])
        return any(after.count(stop) > before.count(stop) for stop in self.sampling.stop)


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64 (Steele, Lea & Flood, 2014), a bijection of 64-bit integers; int64 products wrap around."""
    x = x + _as_int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as an unsigned number; the shift of int64 would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
