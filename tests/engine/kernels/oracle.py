"""References of the kernel tests: definitions in float64, and one function for tolerances."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kernels import token_logprobs
from engine.kernels.decode_attention import Prompts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # `sample` without filters

Leaves = tuple[Tensor, Tensor, Tensor | None]


def make(tokens: int, vocabulary: int, width: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> Leaves:
    torch.manual_seed(tokens + vocabulary)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = (2 * torch.randn(vocabulary, width) / width**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randn(vocabulary).to(dtype).requires_grad_() if bias else None


def in_float64(
    leaves: Leaves, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Leaves, Tensor, Tensor]:
    """Compute the definition with all logits at once. Return new leaves, log-probabilities and entropies."""
    hidden, weight, bias = (None if x is None else x.detach().double().requires_grad_() for x in leaves)
    assert hidden is not None and weight is not None
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return (hidden, weight, bias), logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.double(), exact, atol=tolerance * exact.abs().max().item(), rtol=0)


def compare_with_float64(
    leaves: Leaves, targets: Tensor, temperature: float = 1.0, softcap: float | None = None, *,
    outputs: Sequence[int] = (0, 1), tolerances: tuple[float, float],
) -> None:  # fmt: skip
    """Compare `token_logprobs` and its gradients with the definition, for random upstream gradients of some outputs.

    `tolerances` are those of the values and of the gradients, relative to the largest number.
    """
    upstream = torch.randn(2, len(targets), device=targets.device)
    found = token_logprobs(leaves[0], leaves[1], targets, temperature, leaves[2], softcap)
    exact, *expected = in_float64(leaves, targets, temperature, softcap)
    torch.autograd.backward([found[each] for each in outputs], [upstream[each] for each in outputs])
    torch.autograd.backward([expected[each] for each in outputs], [upstream[each].double() for each in outputs])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        close(mine.detach(), theirs.detach(), tolerances[0])
    for leaf, wide in zip(leaves, exact, strict=True):
        if leaf is not None and wide is not None:
            assert leaf.grad is not None and wide.grad is not None and leaf.grad.dtype == leaf.dtype
            close(leaf.grad, wide.grad, tolerances[1])


def ragged_cache(
    heads: int, key_heads: int, *, width: int, lengths: list[int], capacity: int, dtype: torch.dtype = torch.float32,
    of_values: int | None = None, **extras: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return arguments of decode_attention: shuffled slots, NaN at unused positions, and no prompt tokens."""
    torch.manual_seed(heads + capacity)
    batch, slots = len(lengths), len(lengths) + 2
    keys = torch.randn(slots, key_heads, capacity, width)
    values = torch.randn(slots, key_heads, capacity, of_values or width)
    rows = torch.randperm(slots)[:batch]
    unused = torch.ones(slots, capacity, dtype=torch.bool)
    for row, length in zip(rows, lengths, strict=True):
        unused[row, :length] = False
    for cache in (keys, values):
        cache.masked_fill_(unused[:, None, :, None], float("nan"))
    keys, values = keys.to(DEVICE, dtype), values.to(DEVICE, dtype)
    return {
        "query": (2 * torch.randn(batch, heads, width)).to(DEVICE, dtype), "keys": keys, "values": values,
        "prompts": no_prompts(keys, values, batch), "slots": rows.to(DEVICE),
        "lengths": torch.tensor(lengths, dtype=torch.int64).to(DEVICE), "scale": width**-0.5, **extras,
    }  # fmt: skip


def no_prompts(keys: Tensor, values: Tensor, batch: int) -> Prompts:
    """Return a prompt cache with one slot from which no sequence reads."""
    zeros = torch.zeros(batch, dtype=torch.int64, device=keys.device)
    of_prompts = (cache[:1, :, :1].contiguous() for cache in (keys, values))
    return Prompts(*of_prompts, zeros, zeros, torch.arange(batch, device=keys.device))


def with_prompts(case: dict[str, Any], firsts: list[int], kept: list[int], room: int) -> dict[str, Any]:
    """Move the beginning of each row of a `ragged_cache` case into a prompt cache.

    Row i starts with the tokens of row firsts[i]. Its first kept[i] tokens go to a prompt cache of `room` tokens, in
    one slot for all rows with the same first row. Return three cases with equal results: "alike" has all tokens in the
    slots of the sequences, "joined" reads a shared prompt together, and "apart" reads it once for each row.
    """
    alike = {**case, "keys": case["keys"].clone(), "values": case["values"].clone()}
    of_prompts, own = {}, {}
    for name in ("keys", "values"):
        rows = alike[name][case["slots"]]  # (B, Hkv, T, size)
        of_prompts[name] = torch.full_like(rows, float("nan"))[:, :, :room].repeat(2, 1, 1, 1)
        own[name] = torch.full_like(alike[name], float("nan"))
        for row, (first, n) in enumerate(zip(firsts, kept, strict=True)):
            length = int(case["lengths"][row])
            common = min(n, length, int(case["lengths"][first]))
            rows[row, :, :common] = rows[first, :, :common]
            of_prompts[name][2 * first + 1, :, : min(n, length)] = rows[row, :, : min(n, length)]
            own[name][case["slots"][row], :, : max(0, length - n)] = rows[row, :, n:length]
        alike[name][case["slots"]] = rows
    slots = 2 * torch.tensor(firsts, device=DEVICE) + 1
    rest = {"slots": slots, "lengths": torch.tensor(kept, device=DEVICE)}
    joined, separate = (
        Prompts(**of_prompts, **rest, firsts=torch.tensor(rows, device=DEVICE)) for rows in (firsts, range(len(firsts)))
    )
    case = {**case, **own}
    return {"alike": alike, "joined": {**case, "prompts": joined}, "apart": {**case, "prompts": separate}}


def attention_in_float64(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, prompts: Prompts | None = None,
) -> Tensor:  # fmt: skip
    """Compute the definition for one sequence and head at a time. All tokens are in the slots of the sequences."""
    assert prompts is None or not bool(prompts.lengths.any())
    (batch, heads, _), group = query.shape, query.shape[1] // keys.shape[1]
    out = torch.zeros(batch, heads, values.shape[3], dtype=torch.float64, device=query.device)
    for b in range(batch):
        n = int(lengths[b])
        begin = 0 if window is None else max(0, n - window)
        for h in range(heads if n else 0):
            k, v = (cache[slots[b], h // group, begin:n].double() for cache in (keys, values))
            scores = scale * (k @ query[b, h].double())
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[b, h] = torch.softmax(scores, 0) @ v
    return out


def probability_and_border(
    tokens: Tensor, logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Return the filtered probability of each token and the sum of the probabilities before it: (B,) each, float64."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    p = (logits.double() / temperature).softmax(-1).gather(-1, order)
    if top_k:
        p[:, top_k:] = 0
        p /= p.sum(-1, keepdim=True)
    p[p.cumsum(-1) - p >= (top_p if top_p < 1 else 2)] = 0
    p[p < min_p * p.amax(-1, keepdim=True)] = 0
    p /= p.sum(-1, keepdim=True)
    p = torch.zeros_like(p).scatter_(-1, order, p)  # in the order of the vocabulary
    probability = p.gather(-1, tokens[:, None])[:, 0]
    return probability, p.cumsum(-1).gather(-1, tokens[:, None])[:, 0] - probability
