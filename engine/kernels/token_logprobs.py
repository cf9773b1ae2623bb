"""Per-token log-probability and entropy straight from hidden states and the head, without holding the logits.

    z = softcap(h W^T + b) / temperature      logprob = z_y - lse(z)      entropy = lse(z) - sum_j p_j z_j

with lse = log-sum-exp and p = softmax(z). Backward takes a gradient of its own for every token, of either output:

    dz_j = g (1[j = y] - p_j) - e p_j (log p_j + entropy)        g, e: gradients of logprob and entropy

The vocabulary is walked in blocks, so that no more than a block of logits, (N, block), exists at once; they are
computed again in backward, unless one block is all. Blocks of the vocabulary rather than of tokens: each row of the
weight is then read once, and its gradient is one product over all tokens, accumulated in fp32 and written once.

This is the torch implementation, for every device, and the reference for faster ones beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits a block. On a CPU 8 MB of them: twice as fast as 64 MB, which fall out of the cache and are fresh memory from
# the system each time (measured, 2048 tokens, vocabulary 50,272).
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

    def logits(self, products: "_Products", hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """z, (N, block) fp32; hidden and weight are operands of `products`."""
        z = products(hidden, weight.T)
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
        blocks = _blocks(hidden, weight)
        products = _Products(hidden, weight)
        z = None
        if len(blocks) == 1:
            z = head.logits(products, products.operand(hidden), products.operand(weight), bias)
            lse = z.logsumexp(-1)
            logprobs = z.gather(-1, targets[:, None])[:, 0] - lse
            logp = z - lse[:, None]
            entropy = -torch.linalg.vecdot(logp.exp(), logp)
        else:
            logprobs, entropy, lse = _forward_blocks(head, products, hidden, weight, targets, bias, blocks)
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
    products = _Products(hidden, weight)
    return _forward_blocks(head, products, hidden, weight, targets, bias, _blocks(hidden, weight))


def gradients(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, lse: Tensor, entropy: Tensor,
    of_logprob: Tensor | None, of_entropy: Tensor | None, saved: Tensor | None = None,
    *, wants: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Those of hidden (fp32), weight and bias, where wanted, from those of log-probabilities and entropies.

    `lse` and `entropy` may be those of more rows of the head than `weight` has; a target outside pulls at no row.
    `saved` are the logits, where they were kept.
    """
    if of_logprob is None:
        of_logprob = torch.zeros_like(lse)
    d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wants[0] else None
    d_weight = torch.empty_like(weight) if wants[1] else None
    d_bias = torch.empty_like(bias) if wants[2] and bias is not None else None
    products = _Products(hidden, weight)
    wide = products.operand(hidden)
    for start, end in _blocks(hidden, weight):
        rows = products.operand(weight[start:end])
        z = saved
        if z is None:
            z = head.logits(products, wide, rows, None if bias is None else bias[start:end])
        dz = head.back(_logit_gradient(z, targets - start, lse, entropy, of_logprob, of_entropy), z)
        if d_bias is not None:
            d_bias[start:end] = dz.sum(0)
        if d_hidden is not None:
            d_hidden += products(dz, rows)
        if d_weight is not None:  # rounded once, to the weight's precision, so a plain product will do
            d_weight[start:end] = dz.T.to(hidden.dtype) @ hidden
    return d_hidden, d_weight, d_bias


def _forward_blocks(
    head: Head,
    products: "_Products",
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    blocks: list[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exps, (N,) each, from one block of the vocabulary after another."""
    lses, entropies = [], []  # of each block by itself
    target_logits = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    hidden = products.operand(hidden)
    for start, end in blocks:
        rows = products.operand(weight[start:end])
        z = head.logits(products, hidden, rows, None if bias is None else bias[start:end])
        places, here = _places(targets - start, end - start)
        target_logits += z.gather(-1, places)[:, 0] * here
        highest = z.amax(-1, keepdim=True)
        weights = z.sub_(highest).exp()
        total = weights.sum(-1)
        lses.append(highest[:, 0] + total.log())
        entropies.append(total.log() - torch.linalg.vecdot(weights, z) / total)
    stacked = torch.stack(lses)
    lse = stacked.logsumexp(0)
    log_share = stacked - lse  # of a block in the whole
    entropy = (log_share.exp() * (torch.stack(entropies) - log_share)).sum(0)
    return target_logits - lse, entropy, lse


def _logit_gradient(
    z: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, of_logprob: Tensor, of_entropy: Tensor | None
) -> Tensor:
    """dz (N, block) of the formula above. `targets` count from the block's first column and may lie outside of it."""
    logp = z - lse[:, None]
    dz = logp.exp()
    if of_entropy is None:
        dz.mul_(-of_logprob[:, None])
    else:
        dz.mul_(logp.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_logprob[:, None]))
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


class _Products:
    """Products in fp32, whatever the precision of hidden states and weight.

    A plain product of bf16 matrices rounds its result to bf16, which moves log-probabilities by percents. CUDA has
    products that keep their fp32 accumulators. On the CPU oneDNN is told to compute a product of fp32 matrices in
    bf16, exact for inputs that were bf16 (measured with AMX: 3.4 x as fast as plain fp32, half as fast as bf16, and
    as close to float64 as fp32). fp16 on the CPU computes in fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        same = hidden.dtype == weight.dtype != torch.float32
        self._narrow = hidden.dtype if same and hidden.is_cuda else None
        self._rounds = same and weight.dtype == torch.bfloat16 and hidden.device.type == "cpu"

    def operand(self, matrix: Tensor) -> Tensor:
        """A matrix as products take it, to be made once for several of them."""
        return matrix if self._narrow is not None else matrix.float()

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of operands; a gradient in fp32 will do for either."""
        if self._narrow is not None:
            return torch.mm(a.to(self._narrow), b.to(self._narrow), out_dtype=torch.float32)
        if self._rounds:
            with _bf16_products():
                return a @ b
        return a @ b


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, once."""
    products = _Products(a, b)
    return products(products.operand(a), products.operand(b))


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Let oneDNN round the inputs of fp32 matrix products to bf16. A setting of the process, put back at once."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
