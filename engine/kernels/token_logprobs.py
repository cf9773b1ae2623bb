"""Per-token log-probability and entropy straight from hidden states and the head, without holding the logits.

    z = softcap(h W^T + b) / temperature      logprob = z_y - lse(z)      entropy = lse(z) - sum_j p_j z_j

with lse = log-sum-exp and p = softmax(z). Backward takes a gradient of its own for every token, of either output:

    dz_j = g (1[j = y] - p_j) - e p_j (log p_j + entropy)        g, e: gradients of logprob and entropy

The vocabulary is walked in blocks, so that no more than a block of logits, (N, block), exists at once; they are
computed again in backward, unless one block is all. Blocks of the vocabulary rather than of tokens: each row of the
weight is then read once, and its gradient is one product over all tokens, accumulated in fp32 and written once. The
hidden states' gradient is added up in fp32 over the blocks, each block's share rounded to their precision.

This is the torch implementation, for every device, and the reference for faster ones beside it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels.products import Products, product_of

# Logits a block. On a CPU 8 MB of them stay near the cores from the product to the sums; smaller ones gain nothing.
BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**25}
SMALLEST_BLOCK = 256  # columns; fewer make poor matrix products


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets`, and entropies of the distributions they are from: (N,) fp32 each.

    hidden: (N, D); weight: (V, D); targets: (N,) int64; bias: (V,). `softcap` c bounds logits to c tanh(logit / c)
    (Gemma 2). Hidden and weight may be fp32, bf16 or fp16; logits and all that follows are fp32. Once differentiable in
    hidden, weight and bias. Raises ValueError where the shapes don't fit or the temperature is not positive.
    """
    check(hidden, weight, targets, temperature)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, bias, Head(temperature, softcap))
    return logprobs, entropy


def check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    """Raise ValueError where shapes or temperature are not those of a head."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden (N, D), weight (V, D), targets (N,) do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}, "
            f"{tuple(targets.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")


@dataclass(frozen=True)
class Head:
    """What happens between the head's matrix product and the softmax."""

    temperature: float
    softcap: float | None

    def logits(self, products: Products, hidden: Tensor, rows: Tensor, bias: Tensor | None, room: Tensor) -> Tensor:
        """z, (N, block) fp32, in `room`; hidden and rows are operands of `products`."""
        z = products(hidden, rows.T, room)
        if bias is not None:
            z += bias
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature) if self.temperature != 1 else z

    def back(self, dz: Tensor, z: Tensor) -> Tensor:
        """The gradient before softcap and temperature, from `dz` (in place) and what `logits` returned."""
        if self.softcap is not None:
            dz.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        return dz.div_(self.temperature) if self.temperature != 1 else dz


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, head: Head
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.head = head
        z = None
        if len(_blocks(hidden, weight)) == 1:
            products = Products(hidden, weight)
            room = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
            z = head.logits(products, products.operand(hidden), products.operand(weight), bias, room)
            lse = z.logsumexp(-1)
            logprobs = z.gather(-1, targets[:, None])[:, 0] - lse
            logp = z - lse[:, None]
            entropy = -torch.linalg.vecdot(logp.exp(), logp)
        else:
            logprobs, entropy, lse = statistics(head, hidden, weight, targets, bias)
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy, z)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, lse, entropy, saved = ctx.saved_tensors
        d_logprobs, d_entropy = upstream
        d_hidden, d_weight, d_bias = gradients(
            ctx.head, hidden, weight, targets, bias, lse, entropy, d_logprobs, d_entropy, saved, wants=wanted(ctx)
        )
        return (None if d_hidden is None else d_hidden.to(hidden.dtype)), d_weight, None, d_bias, None


def wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether hidden, weight and bias need gradients; they are inputs 0, 1 and 3."""
    needs = ctx.needs_input_grad
    return needs[0], needs[1], needs[3]


def statistics(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exps, (N,) fp32 each; a target outside of the rows counts as logit 0."""
    lses, entropies = [], []  # of each block by itself
    target_logits = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    products, blocks = Products(hidden, weight), _blocks(hidden, weight)
    logits, weights = (_Buffer.widest(hidden, blocks) for _ in range(2))
    wide = products.operand(hidden)
    for start, end in blocks:
        rows = products.operand(weight[start:end])
        z = head.logits(products, wide, rows, None if bias is None else bias[start:end], logits(end - start))
        places, here = _places(targets - start, end - start)
        target_logits += z.gather(-1, places)[:, 0] * here
        highest, total, pull = _sums(z, weights)
        lses.append(highest + total.log())
        entropies.append(total.log() - pull / total)
    stacked = torch.stack(lses)
    lse = stacked.logsumexp(0)
    log_share = stacked - lse  # of a block in the whole
    entropy = (log_share.exp() * (torch.stack(entropies) - log_share)).sum(0)
    return target_logits - lse, entropy, lse


def _sums(z: Tensor, room: "_Buffer") -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of z (N, block), which changes: the highest logit, and the sums of w and of w (z - highest), with
    w = e^(z - highest).
    """
    highest = z.amax(-1, keepdim=True)
    weights = torch.exp(z.sub_(highest), out=room(z.shape[1]))
    return highest[:, 0], weights.sum(-1), weights.mul_(z).sum(-1)


def gradients(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    of_logprob: Tensor | None,
    of_entropy: Tensor | None,
    saved: Tensor | None = None,
    *,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of hidden (fp32), weight and bias, where wanted, from those of log-probabilities and entropies.

    `lse` and `entropy` may be those of more rows of the head than `weight` has; a target outside pulls at no row.
    `saved` are the logits, where they were kept.
    """
    if of_logprob is None:
        of_logprob = torch.zeros_like(lse)
    d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wants[0] else None
    products, blocks = Products(hidden, weight), _blocks(hidden, weight)
    d_weight = torch.empty_like(weight, dtype=products.dtype) if wants[1] else None
    d_bias = torch.empty_like(bias) if wants[2] and bias is not None else None
    types = (torch.float32, torch.float32, products.dtype)
    logits, slopes, narrow = (_Buffer.widest(hidden, blocks, of) for of in types)
    wide, rounded = products.operand(hidden), hidden.to(products.dtype)
    for start, end in blocks:
        width = end - start
        rows = products.operand(weight[start:end])
        z = saved
        if z is None:
            z = head.logits(products, wide, rows, None if bias is None else bias[start:end], logits(width))
        dz = _logit_gradient(z, targets - start, lse, entropy, of_logprob, of_entropy, out=slopes(width))
        head.back(dz, z)
        if d_bias is not None:
            d_bias[start:end] = dz.sum(0)
        if dz.dtype != products.dtype:
            dz = narrow(width).copy_(dz)
        if d_hidden is not None:
            d_hidden += product_of(dz, weight[start:end].to(products.dtype))
        if d_weight is not None:
            product_of(dz.T, rounded, d_weight[start:end])
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), d_bias


def _logit_gradient(
    z: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, of_logprob: Tensor, of_entropy: Tensor | None, out: Tensor
) -> Tensor:
    """dz (N, block) of the formula above. `targets` count from the block's first column and may lie outside of it."""
    logp = torch.sub(z, lse[:, None], out=out)
    if of_entropy is None:
        dz = logp.exp_().mul_(-of_logprob[:, None])
    else:
        p = logp.exp()
        pull = of_logprob + of_entropy * entropy
        dz = logp.mul_(-of_entropy[:, None]).sub_(pull[:, None]).mul_(p)
    places, here = _places(targets, z.shape[1])
    return dz.scatter_add_(1, places, (of_logprob * here)[:, None])


def _places(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns (N, 1) to look at, and whether the target is one of the block's (N,)."""
    here = (targets >= 0) & (targets < width)
    return targets.clamp(0, width - 1)[:, None], here


def _blocks(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """Cut the vocabulary into even blocks [start, end) of at most BLOCK_ELEMENTS logits."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    elements = BLOCK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "cuda"]
    widest = max(SMALLEST_BLOCK, elements // max(tokens, 1))
    count = -(-vocabulary // widest)
    return [(vocabulary * i // count, vocabulary * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True)
class _Buffer:
    """Memory for (N, block) numbers, used again block after block: fresh memory costs the system more than the sums."""

    memory: Tensor
    tokens: int

    @classmethod
    def widest(cls, hidden: Tensor, blocks: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> "_Buffer":
        tokens, width = len(hidden), max(end - start for start, end in blocks)
        return cls(hidden.new_empty(tokens * width, dtype=dtype), tokens)

    def __call__(self, width: int) -> Tensor:
        return self.memory[: self.tokens * width].view(self.tokens, width)
