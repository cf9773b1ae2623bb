"""What a model's plain forward says, and how far from it rounding may lead: every fast way is held to that."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation.served import positions_of

NEW_TOKENS = 8
LENGTHS = (5, 12, 10)  # tokens of the prompts: unequal, so that a slot taken for another, or padding, shows
# Mean differences of log-probability that rounding explains, for logits up to 1; they grow with the largest logit. A
# single token's may be twice as large. Measured: an eighth of it in bf16, a third with large adapters merged.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EIGHT_BITS = 9e-2  # of a forward with weights that were gathered in 8 bits: measured, two to four times bf16's
CHOICES = 4.0  # times as much where rounding may send a token to another expert
RELATIVE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of hidden states
# Of logits. Measured in bf16: 0.01 to 0.04 over 12 to 28 layers with random weights, the larger the larger those are.
APART = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

SAME = 1e-6  # relative: the same calls in the same order


def fixed_prompts(module: nn.Module) -> list[list[int]]:
    """Token ids from all over the vocabulary, the same at each call, as long as the model has positions for.

    One of each is the model's padding, which may stand in a prompt, as where it is the end token as well.
    """
    config: Any = module.config
    vocabulary = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    limit = positions_of(module) or 1 << 30
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max(1, limit - NEW_TOKENS)) for length in LENGTHS]
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        for prompt in prompts:
            prompt[len(prompt) // 2] = padding
    return prompts


@torch.inference_mode()
def plain_logits(module: nn.Module, device: torch.device, token_ids: Sequence[int], **extra: Any) -> Tensor:
    """(tokens, V): the whole sequence at once through the module as it is, no cache, no padding."""
    logits: Tensor = module(input_ids=torch.tensor([token_ids], device=device), use_cache=False, **extra).logits
    return logits[0]


def counts_from_zero(module: nn.Module, device: torch.device) -> bool:
    """Whether positions 0, 1, ... told to a module are those that it gives its tokens by itself, if it takes any."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return True
    prompt = fixed_prompts(module)[0]
    told = plain_logits(module, device, prompt, position_ids=torch.arange(len(prompt), device=device)[None])
    own = plain_logits(module, device, prompt)
    return bool((told.double() - own.double()).norm() <= SAME * own.double().norm())


def disagreement(logits: Tensor, token_ids: Sequence[int], logprobs: Sequence[float], tolerance: float) -> str | None:
    """What is wrong with a greedy answer, by the plain forward's logits (n, V) before each of its tokens."""
    tokens = torch.tensor(token_ids, device=logits.device)
    likeliest, best = logits.max(-1)
    short = likeliest - logits.gather(-1, tokens[:, None])[:, 0]
    gaps = (logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu() - torch.tensor(logprobs)).abs()
    for place in range(len(tokens)):
        if not bool(short[place] <= 2 * tolerance):
            return f"token {place} is {int(tokens[place])}, the plain forward says {int(best[place])}"
        if not bool(gaps[place] <= 2 * tolerance):
            return f"the log-probability of token {place} is off by {gaps[place]:.2g} (rounding: {tolerance:.2g})"
    if not bool(gaps.mean() <= tolerance):
        return f"log-probabilities are off by {gaps.mean():.2g} on average (rounding: {tolerance:.2g})"
    return None


def tolerance_of(module: nn.Module, logits: Tensor, *, eight_bits: bool = False) -> float:
    """What rounding explains of a log-probability, by the model's precision and the logits' size. With `eight_bits`, of
    one that another forward gave, whose weights were rounded to as many.
    """
    dtype = _precision(module)
    rounding = (EIGHT_BITS if eight_bits else TOLERANCE.get(dtype, 3e-2)) * max(1.0, logits.abs().max().item())
    return rounding * (CHOICES if (eight_bits or dtype != torch.float32) and makes_choices(module) else 1.0)


def far_apart(module: nn.Module, mine: Tensor, plain: Tensor) -> bool:
    """Whether logits (n, V) differ by more than rounding explains, by their norms: true of small logits, too.

    At any of the n places; where rounding may turn a choice, at most of them.
    """
    dtype = _precision(module)
    gaps = (mine.double() - plain.double()).norm(dim=-1) / plain.double().norm(dim=-1)
    turns = dtype != torch.float32 and makes_choices(module)
    return not bool((gaps.median() if turns else gaps.max()) <= APART.get(dtype, 1e-1))


def makes_choices(module: nn.Module) -> bool:
    """Whether experts, or tokens to attend to, are chosen, by the names of its parts: rounding may turn a choice."""
    leaves = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return any("expert" in leaf or "indexer" in leaf for leaf in leaves)


def _precision(module: nn.Module) -> torch.dtype:
    """What the model computes in; some bring their logits to fp32."""
    return module.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]
