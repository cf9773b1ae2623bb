"""Milliseconds of our kernels against plain PyTorch.

On a GPU the Triton kernels run, on a CPU the C kernels or the torch references. The plain side is the simplest code:
all logits for log-probabilities, masked attention over all of the cache, softmax and multinomial for sampling. On a
GPU the detail has the bound of the memory bandwidth.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import in_turn, median, spread
from benchmarks.record import Result
from engine import kernels
from engine.kernels_cpu import attention as in_c

CASES = ("logprobs", "logprobs_backward", "attention", "sample", "sample_filtered")


@dataclass(frozen=True)
class Work:
    """Our function, the plain function, and the minimum of bytes that each reads and writes."""

    ours: Callable[[], object]
    plain: Callable[[], object]
    bytes: int


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure on the GPU if there is one, otherwise on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for case in cases:
        yield measure(case, device, rounds=rounds)


def measure(case: str, device: torch.device, *, rounds: int = 5, tiny: bool = False) -> Result:
    """Measure one case. Our function and the plain one alternate after a warm-up of each."""
    work = _MAKERS[case](device, 16 if tiny else 1)
    calls = {name: _timed(call, device) for name, call in (("ours", work.ours), ("plain", work.plain))}
    for call in calls.values():
        call()
    times = in_turn(calls, rounds)
    detail: dict[str, object] = {"device": device.type, "bytes": work.bytes, "spread": spread(times["ours"])}
    if device.type == "cuda":
        rate = _copy_rate(device)
        detail |= {"floor_ms": 1e3 * work.bytes / rate, "of_floor": 1e-3 * median(times["ours"]) * rate / work.bytes}
    return Result("kernels", case, median(times["ours"]), "ms", True, median(times["plain"]), detail)


def _timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return a function that measures the milliseconds of a call. GPUs run many calls to hide the launch."""
    calls = 20 if device.type == "cuda" else 1

    def time() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (perf_counter() - start) / calls

    return time


def _copy_rate(device: torch.device) -> float:
    source = torch.empty(2**31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    time = _timed(lambda: target.copy_(source), device)
    time()
    return 2 * source.numel() / (1e-3 * time())


def _logprobs(device: torch.device, shrink: int, backward: bool = False) -> Work:
    """Return the work of 4,096 tokens (CPU: 512) and a head of 50,272 x 2,048 (CPU: 768) in bf16."""
    tokens, width = (4096, 2048) if device.type == "cuda" else (512, 768)
    tokens, vocabulary, width = tokens // shrink, 50272 // shrink, width // shrink
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_(backward)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).bfloat16().requires_grad_(backward)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    upstream = torch.randn(2, tokens, device=device)

    def plain() -> tuple[Tensor, Tensor]:
        logp = (hidden @ weight.T).float().log_softmax(-1)
        return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def differentiated(function: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], object]:
        if not backward:
            return function
        return lambda: torch.autograd.grad(function(), (hidden, weight), (upstream[0], upstream[1]))

    read_bytes = 2 * (hidden.numel() + weight.numel())
    return Work(
        differentiated(lambda: kernels.token_logprobs(hidden, weight, targets)),
        differentiated(plain),
        read_bytes * (3 if backward else 1),
    )


def _attention(device: torch.device, shrink: int) -> Work:
    """Return the work of 32 sequences of 64 to 2,048 tokens (CPU: 9 to 256), 32 heads of 64, bf16."""
    batch, longest = 32, (2048 if device.type == "cuda" else 256) // shrink
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 32 + 1, longest + 1, (batch,), generator=generator).to(device)
    cache = torch.randn(2, batch, 32, longest, 64, device=device).bfloat16()
    query = torch.randn(batch, 32, 64, device=device).bfloat16()
    slots, zeros = torch.arange(batch, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    prompt_keys, prompt_values = cache[:, :1, :, :1].contiguous()
    prompts = kernels.Prompts(prompt_keys, prompt_values, zeros, zeros, slots)  # no row reads a prompt
    mask = (torch.arange(longest, device=device) < lengths[:, None])[:, None, None]

    def ours() -> Tensor:
        return kernels.decode_attention(query, cache[0], cache[1], prompts, slots, lengths, 0.125)

    if device.type == "cpu" and in_c.supports(query.dtype):  # the kernel in C also writes the newest token
        attention = in_c.SlotAttention(*prompts[:2], *cache, scale=0.125)
        keys, values = cache[:, slots, :, lengths - 1].transpose(0, 1).transpose(1, 2)[:, None]

        def ours() -> Tensor:
            rows = in_c.addresses(slots, lengths, *prompts[2:])
            return attention(query.transpose(0, 1)[None], keys, values, rows)

    return Work(
        ours,
        lambda: scaled_dot_product_attention(query[:, :, None], cache[0], cache[1], attn_mask=mask, scale=0.125),
        2 * 2 * 32 * 64 * int(lengths.sum()),
    )


def _sample(device: torch.device, shrink: int, top_p: float = 1.0) -> Work:
    """Return the work of 64 rows of 50,272 logits."""
    logits = 3 * torch.randn(64, 50272 // shrink, device=device)
    uniforms = torch.rand(64, device=device)

    def plain() -> Tensor:
        probabilities = logits.softmax(-1)
        if top_p < 1:
            ranked, order = probabilities.sort(-1, descending=True)
            nucleus = ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0)
            probabilities = torch.zeros_like(nucleus).scatter_(-1, order, nucleus)
        tokens = torch.multinomial(probabilities, 1)
        return logits.log_softmax(-1).gather(-1, tokens)

    return Work(lambda: kernels.sample(logits, uniforms, top_p=top_p), plain, 4 * logits.numel())


_MAKERS: dict[str, Callable[[torch.device, int], Work]] = {
    "logprobs": _logprobs,
    "logprobs_backward": lambda device, shrink: _logprobs(device, shrink, backward=True),
    "attention": _attention,
    "sample": _sample,
    "sample_filtered": lambda device, shrink: _sample(device, shrink, top_p=0.9),
}
