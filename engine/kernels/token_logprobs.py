"""Log-probability and entropy of each token from hidden states and the head, without all logits in memory.

    z = softcap(h W^T + b) / temperature      logprob = z_y - lse(z)      entropy = lse(z) - sum_j p_j z_j

with lse = log-sum-exp and p = softmax(z). Backward takes an upstream gradient per token for either output:

    dz_j = g (1[j = y] - p_j) - e p_j (log p_j + entropy)        g, e: gradients of logprob and entropy

The head may be sharded over ranks by rows of the vocabulary (Shoeybi et al., 2019, arXiv:1909.08053). Each rank reduces
its own rows to lse_r, entropy H_r and, if the target is among them, its logit. Ranks exchange these three numbers per
token, never logits. With m = max_r lse_r and w_r = e^(lse_r - m):

    lse = m + log sum_r w_r        entropy = lse + sum_r w_r (H_r - lse_r) / sum_r w_r        logprob = z_y - lse

Backward is the formula above over the rank's rows, with the lse and the entropy of all rows; the gradient of the hidden
states is the sum over ranks.

`statistics` and `gradients` walk the vocabulary in blocks, so at most a block of logits, (N, block), is in memory;
backward computes the logits again. Each row of the weight is read once, and its gradient is one product over all
tokens, accumulated in fp32 and written once. The device's library multiplies. `reduce_block` and `block_gradient` are
the passes between the products: Triton on GPUs, otherwise the torch references in this file.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.kernels.products import product_of, products_of
from engine.kernels_triton.device import ALIGNMENT, has_triton

# Logits per block. On CPUs 8 MB of logits stay in the caches from the product to the sums; smaller blocks gain nothing.
BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**25}
SMALLEST_BLOCK = 256  # columns; fewer columns make slow matrix products

Reduction = Callable[..., tuple[Tensor, Tensor, Tensor]]
Gradient = Callable[..., Tensor]


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of a sharded head that this rank holds, and collectives over the ranks that share the head.

    first: the index of the rank's first row. max and sum: elementwise reductions of a tensor that may be overwritten.
    """

    first: int
    max: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of its distribution, (N,) fp32 each.

    hidden: (N, D). weight: (V, D), or the rows of `shard`. targets: (N,) int64. bias: (V,). `softcap` c bounds logits
    to c tanh(logit / c) (Gemma 2). Hidden and weight may be fp32, bf16 or fp16; logits and all that follows are fp32.
    Once differentiable in hidden, weight and bias. With a shard every rank calls, forward and backward, with the same
    hidden states, targets and upstream gradients. A target outside of the vocabulary gives NaN without a shard. Raises
    ValueError if the shapes do not fit or the temperature is not positive.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "hidden must be (N, D), weight (V, D) and targets (N,), not "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, bias, Head(temperature, softcap), shard)
    return logprobs, entropy


def _implementation(hidden: Tensor) -> tuple[Reduction, Gradient]:
    if hidden.is_cuda and has_triton():
        from engine.kernels_triton import token_logprobs as in_triton

        return in_triton.reduce_block, in_triton.block_gradient
    return reduce_block, block_gradient


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        head: "Head",
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        targets = targets if shard is None else targets - shard.first
        logprobs, entropy, lse = statistics(head, hidden, weight, targets, bias)
        if shard is None:
            logprobs = torch.where((targets >= 0) & (targets < len(weight)), logprobs, torch.nan)
        else:
            highest = shard.max(lse.clone())
            weights = (lse - highest).exp()
            sums = shard.sum(torch.stack([weights, weights * (entropy - lse + highest), logprobs + lse]))
            lse = highest + sums[0].log()
            logprobs, entropy = sums[2] - lse, sums[0].log() + sums[1] / sums[0]
        ctx.head, ctx.shard = head, shard
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, lse, entropy = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_logprobs = torch.zeros_like(lse) if d_logprobs is None else d_logprobs
        d_hidden, d_weight, d_bias = gradients(
            ctx.head, hidden, weight, targets, bias, lse, entropy, d_logprobs, d_entropy,
            needs=(needs[0], needs[1], needs[3]),
        )  # fmt: skip
        if d_hidden is not None:
            d_hidden = (d_hidden if ctx.shard is None else ctx.shard.sum(d_hidden)).to(hidden.dtype)
        return d_hidden, (None if d_weight is None else d_weight.to(weight.dtype)), None, d_bias, None, None


class Head(NamedTuple):
    """The operations between the head's matrix product and the softmax."""

    temperature: float
    softcap: float | None

    def logits(self, products: Tensor, bias: Tensor | None) -> Tensor:
        """Return z from the products of hidden states and rows of the head, (N, block) fp32, in place."""
        z = products
        if bias is not None:
            z += bias
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature) if self.temperature != 1 else z

    def back(self, dz: Tensor, z: Tensor) -> Tensor:
        """Return the gradient before softcap and temperature, from `dz` (in place) and the result of `logits`."""
        if self.softcap is not None:
            dz.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        return dz.div_(self.temperature) if self.temperature != 1 else dz


def statistics(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and log-sum-exps, (N,) fp32 each.

    A target outside of the rows counts as logit 0.
    """
    reduce, _ = _implementation(hidden)
    lses, entropies = [], []  # of each block
    target_logits = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    products, blocks = products_of(hidden, weight), _blocks(hidden, weight)
    operand = hidden.to(products.operand_dtype)
    for start, end in blocks:
        rows = weight[start:end].to(products.operand_dtype)
        z = products.multiply(operand, rows.T)
        lse, entropy, logits = reduce(head, z, None if bias is None else bias[start:end], targets - start)
        lses.append(lse)
        entropies.append(entropy)
        target_logits += logits
    stacked = torch.stack(lses)
    lse = stacked.logsumexp(0)
    log_share = stacked - lse  # the log-probability of a block
    entropy = (log_share.exp() * (torch.stack(entropies) - log_share)).sum(0)
    return target_logits - lse, entropy, lse


def reduce_block(head: Head, products: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp, the entropy and the target's logit of each token within a block, (N,) fp32 each.

    products: (N, block) fp32 of hidden states and rows of the head, may be overwritten. bias: (block,). targets: (N,)
    count from the block's first column; the logit of a target outside of the block is 0.
    """
    z = head.logits(products, bias)
    columns, is_inside = _columns(targets, z.shape[1])
    logits = z.gather(-1, columns)[:, 0] * is_inside
    highest = z.amax(-1, keepdim=True)
    w = z.sub_(highest).exp()
    total, moment = w.sum(-1), w.mul_(z).sum(-1)
    return highest[:, 0] + total.log(), total.log() - moment / total, logits


def gradients(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    *,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden (fp32), weight and bias that are needed.

    `lse` and `entropy` may be those of more rows than `weight` has; a target outside of the rows adds to no gradient.
    """
    _, gradient = _implementation(hidden)
    d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None
    products, blocks = products_of(hidden, weight), _blocks(hidden, weight)
    d_weight = torch.empty_like(weight, dtype=products.dtype) if needs[1] else None
    d_bias = torch.empty_like(bias) if needs[2] and bias is not None else None
    operand = hidden.to(products.operand_dtype)
    rounded = hidden.to(products.dtype)
    for start, end in blocks:
        rows = weight[start:end].to(products.operand_dtype)
        z = products.multiply(operand, rows.T)
        dz = gradient(
            head, z, None if bias is None else bias[start:end], targets - start, lse, entropy, d_logprobs, d_entropy,
            products.dtype,
        )  # fmt: skip
        if d_bias is not None:
            d_bias[start:end] = dz.sum(0, dtype=torch.float32)
        if d_hidden is not None:  # a GPU adds the blocks without rounding each of them
            multiply = products.multiply if dz.is_cuda else product_of
            d_hidden += multiply(dz, weight[start:end].to(products.dtype))
        if d_weight is not None:
            product_of(dz.T, rounded, d_weight[start:end])
    return d_hidden, d_weight, d_bias


def block_gradient(
    head: Head,
    products: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of a block's products, (N, block) in `dtype`, by the formula of this module.

    products, bias and targets: as in `reduce_block`. lse, entropy and their gradients: (N,) fp32.
    """
    z = head.logits(products, bias)
    logp = z - lse[:, None]
    if d_entropy is None:
        dz = logp.exp_().mul_(-d_logprobs[:, None])
    else:
        p = logp.exp()
        dz = logp.mul_(-d_entropy[:, None]).sub_((d_logprobs + d_entropy * entropy)[:, None]).mul_(p)
    columns, is_inside = _columns(targets, z.shape[1])
    dz.scatter_add_(1, columns, (d_logprobs * is_inside)[:, None])
    head.back(dz, z)
    return dz.to(dtype)


def _columns(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns (N, 1) of the targets in a block, and whether each target is in the block, (N,)."""
    is_inside = (targets >= 0) & (targets < width)
    return targets.clamp(0, width - 1)[:, None], is_inside


def _blocks(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """Divide the vocabulary into even blocks [start, end) of at most BLOCK_ELEMENTS logits, aligned to ALIGNMENT."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    elements = BLOCK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "cuda"]
    widest = max(ALIGNMENT, max(SMALLEST_BLOCK, elements // max(tokens, 1)) // ALIGNMENT * ALIGNMENT)
    count = -(-vocabulary // widest)
    width = -(-vocabulary // (count * ALIGNMENT)) * ALIGNMENT
    return [(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]
