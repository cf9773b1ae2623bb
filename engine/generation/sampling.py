"""Sampling: one token a row from logits, and its log-probability.

Pure functions of tensors. A sequence has a random stream of its own: the number drawn for its n-th token is a hash of
(seed, stream, n), a counter-based generator in the sense of Salmon et al., 2011 ("Parallel random numbers: as easy as
1, 2, 3"). So a sampled token depends on the seed, the stream, the position and the logits only, never on the batch
around it, and all devices draw the same numbers.

Tokens come from the inverse of the cumulative distribution: one uniform number a row instead of noise over the whole
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK, BLOCKS = 256, 16  # weights summed together where there are at least so many blocks of them


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    `temperature` 0 takes the likeliest token. `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing; `min_p` drops tokens
    with less than this share of the likeliest one's probability (Nguyen et al., 2024). `repetition_penalty` above 1
    makes tokens that stand in prompt or answer less likely (Keskar et al., 2019, "CTRL"); 1 changes nothing.
    An answer ends with the first of `end_ids` (included), with the token that completes one of the strings `stop`, or
    after `max_new_tokens`; no end token is drawn before `min_new_tokens` tokens stand.
    `pad_id` fills rows up; it may be one of `end_ids`, no mask is ever made from ids.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()
    pad_id: int = 0
    seed: int = 0
    min_new_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a positive number, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 (off) and 1, not {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a positive number, 1 for none, not {self.repetition_penalty}")
        if not all(self.stop):
            raise ValueError("stop must not hold the empty string: it would end every answer at once")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens must be between 0 and {self.max_new_tokens}, not {self.min_new_tokens}")


def uniforms(seed: int, streams: Tensor, position: int | Tensor) -> Tensor:
    """Numbers in [0, 1), fp32, the same on every device.

    `streams` is int64 of any shape; `position` is a number or an int64 tensor that broadcasts against it, as the result
    does: streams (B, 1) and positions (1, T) give (B, T).
    """
    state = _mix(_mix(torch.full_like(streams, _as_int64(seed))) + streams)
    bits = _mix(state + position)
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24  # the top 24 bits: exact in fp32


def under_seed(seed: int, streams: Tensor) -> Tensor:
    """Streams that draw under seed 0 what `streams` draw under `seed`: a seed is a shift of its streams."""
    zero = torch.zeros_like(streams)
    return streams + _mix(zero + _as_int64(seed)) - _mix(zero)


def sample(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row: logits (B, V), uniforms (B,) -> tokens (B,) int64, log-probabilities (B,) fp32.

    The log-probability is that under the distribution the token was drawn from: temperature applied, filtered tokens
    gone, the rest normalised. Greedy tokens carry the one of the plain distribution (temperature 1).
    A token of probability zero is never drawn. Rows with NaN give NaN log-probabilities.
    """
    if sampling.temperature > 0 and sampling.top_k == 0 and sampling.top_p == 1:
        return _invert(_without_unlikely(_weights(logits, sampling.temperature), sampling.min_p), uniforms)
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        return tokens, chosen - logits.logsumexp(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    ranked, tokens = _ranked(logits, sampling.top_k)
    probabilities = ranked.softmax(-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # mass of all likelier tokens
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    probabilities = _without_unlikely(probabilities, sampling.min_p)
    places, logprobs = _invert(probabilities, uniforms)
    return tokens.gather(-1, places[:, None])[:, 0], logprobs


def forbid(logits: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Logits (B, V) without the tokens `ids`; in place."""
    logits[:, list(ids)] = float("-inf")
    return logits


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (B, V) with those of tokens seen (B, V) divided by `penalty` where positive, multiplied where negative."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


@dataclass
class Ending:
    """Says of each token drawn whether it ends its answer, and remembers which answers ended.

    `text` turns token ids into text; only stop strings need it.
    """

    sampling: Sampling
    text: Callable[[list[int]], str] | None = None
    ended: set[int] = field(default_factory=set)
    _answers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sampling.stop and self.text is None:
            raise ValueError("stop strings need text=, a function that turns token ids into text")
        # Every token is a byte at least; a few more, as the first ones may decode otherwise than in their place.
        self._tail = max((len(stop.encode()) for stop in self.sampling.stop), default=0) + 8

    def __call__(self, answer: int, token: int) -> bool:
        ends = token in self.sampling.end_ids or self._stops(answer, token)
        if ends:
            self.ended.add(answer)
        return ends

    def _stops(self, answer: int, token: int) -> bool:
        if self.text is None or not self.sampling.stop:
            return False
        said = self._answers.setdefault(answer, [])
        said.append(token)
        if len(said) < self.sampling.min_new_tokens:
            return False
        before, after = self.text(said[-self._tail : -1]), self.text(said[-self._tail :])
        return any(after.count(stop) > before.count(stop) for stop in self.sampling.stop)


def _without_unlikely(probabilities: Tensor, min_p: float) -> Tensor:
    if min_p == 0:
        return probabilities
    return probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)


def _ranked(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` largest logits of each row (0: all) in falling order, and their tokens: both (B, K)."""
    if 0 < top_k < logits.shape[-1]:
        return torch.topk(logits, top_k, dim=-1)
    return torch.sort(logits, dim=-1, descending=True, stable=True)


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """What the probabilities of logits (B, V) are proportional to: (B, V or more), fp32, in [0, 1].

    Many are filled up with zeros to whole blocks, for `_invert`. Every pass works in the one copy that is made.
    """
    rows, size = logits.shape
    if size < BLOCKS * BLOCK:
        weights = logits.to(torch.float32, copy=True)
    else:
        weights = logits.new_empty(rows, -(-size // BLOCK) * BLOCK, dtype=torch.float32)
        weights[:, :size] = logits
        weights[:, size:] = float("-inf")
    weights -= weights.amax(-1, keepdim=True)
    if temperature != 1:
        weights /= temperature
    return weights.exp_()


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative sum of weights (B, V) at uniforms (B,): places (B,), log-probabilities (B,).

    The place found is the first whose cumulative sum exceeds u times the total, so it carries weight. Rounding may make
    this fail in the last bit; the heaviest place stands in then. Of many weights whole blocks are summed first, and one
    of them is looked into: the cumulative sum of all takes five times as long as their sum.
    """
    rows, size = weights.shape
    drawn = uniforms[:, None].to(weights.dtype)
    if size % BLOCK or size < BLOCKS * BLOCK:
        cumulative = weights.cumsum(-1)
        total = cumulative[:, -1:]
        places = _first_above(cumulative, drawn * total)
    else:
        blocks = weights.view(rows, -1, BLOCK)
        sums = blocks.sum(-1)
        cumulative = sums.cumsum(-1)
        total = cumulative[:, -1:]
        block = _first_above(cumulative, drawn * total)
        rest = drawn * total - (cumulative.gather(-1, block) - sums.gather(-1, block))
        within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]
        places = block * BLOCK + _first_above(within.cumsum(-1), rest.clamp_(min=0))
    found = weights.gather(-1, places)
    if found.device.type != "cpu" or not bool((found > 0).all()):  # asking a GPU would wait for it
        places = torch.where(found > 0, places, weights.argmax(-1, keepdim=True))
        found = weights.gather(-1, places)
    return places[:, 0], (found / total).log()[:, 0]


def _first_above(cumulative: Tensor, share: Tensor) -> Tensor:
    """The first place (B, 1) of rows (B, V) that rise whose number exceeds the row's share (B, 1), else the last."""
    return torch.searchsorted(cumulative, share, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers in which every bit of the input moves half of the output's (splitmix64: Steele,
    Lea & Flood, 2014; the constants are its). Products wrap around, as they do in every int64 tensor."""
    x = x + _as_int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as an unsigned number: int64's own shift would drag the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    """The int64 with the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
