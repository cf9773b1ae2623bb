"""Checks of a model: whether the slot cache supports it, and whether the generator computes it (parity check).

A configuration shows which layers the slot cache cannot run and how long a sequence may be.

The check decodes fixed prompts and scores the answers by the plain forward. Without the check, a generator that
computes another model would train the policy on that model's text, and no error would stop the run. Each sampled token
must be the most likely one of the module's plain forward, with the same log-probability up to rounding. A failed check
names the likely cause.

All tolerances are for numbers that were computed twice, in another order of operations.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.generation.sampling import Sampling

if TYPE_CHECKING:
    from engine.generation.generator import Generation, Generator

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
NEW_TOKENS = 8
LENGTHS = (5, 12, 10)  # tokens of the prompts; unequal lengths reveal swapped slots and wrong padding
# The difference of log-probability that the layers' rounding explains; `rounding` adds that of the logits. Measured in
# bf16, 12 layers, random weights: means of 0.01 to 0.07 for largest logits of 5 to 60, half of the sum or less.
LAYER_TOLERANCE = {torch.float32: 2e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
EIGHT_BIT_FACTOR = 3.0  # of bf16's difference, for weights gathered in 8 bits
ROUTING_FACTOR = 4.0  # rounding may route a token to another expert
# Relative, of logits. Measured in bf16: 0.01 to 0.04 over 12 to 28 layers with random weights.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
SAME_COMPUTATION = 1e-6  # relative: the same operations in the same order


class UnsupportedModel(Exception):
    """Raised if a model needs something that attention over the slot cache does not compute. The message gives it."""


def check_model(module: nn.Module) -> bool:
    """Check that the slot cache supports a model; return whether the model can compute chosen logits only.

    Raises UnsupportedModel if not.
    """
    text = _text_config(module)
    names = set(inspect.signature(module.forward).parameters)
    if not getattr(module, "_supports_attention_backend", False) or "position_ids" not in names:
        raise UnsupportedModel("its class does not let an attention function be registered")
    unsupported = set(getattr(text, "layer_types", None) or []) - SUPPORTED_LAYERS
    if unsupported:
        raise UnsupportedModel(f"it has layers of other types ({', '.join(sorted(unsupported))})")
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedModel("it has layers that share their keys")
    return "logits_to_keep" in names


def max_positions(module: nn.Module) -> int | None:
    """Return how many tokens a sequence may have; None if the configuration does not limit it.

    Some families reserve the first rows of their position table for padding, which no configuration field contains.
    Models whose rotary frequencies change in longer sequences end there (`frequency_change`).
    """
    text, change = _text_config(module), frequency_change(module)
    if change is not None:
        return change
    rows: int | None = getattr(text, "max_position_embeddings", None)
    if rows is not None and rows < 1:  # XLNet has -1
        return None
    for child in module.modules():
        if isinstance(child, nn.Embedding) and child.num_embeddings == rows != text.vocab_size:
            return rows if child.padding_idx is None else rows - child.padding_idx - 1
    return rows


def frequency_change(module: nn.Module) -> int | None:
    """Return the length above which all rotary frequencies change (LongRoPE: Ding et al., 2024); None if they do not.

    transformers chooses the frequencies by the longest sequence of a forward. Beyond this length the numbers of a token
    would depend on the other sequences, and cached keys would be wrong once their sequence grows longer.
    """
    rope: dict[str, Any] = getattr(_text_config(module), "rope_parameters", None) or {}
    each = [rope] if "rope_type" in rope else [by_layer for by_layer in rope.values() if isinstance(by_layer, dict)]
    changes = [one["original_max_position_embeddings"] for one in each if one.get("rope_type") == "longrope"]
    return min(changes, default=None)


def has_window(module: nn.Module) -> bool:
    """Return whether the configuration lets some layers attend to the last tokens only."""
    text = _text_config(module)
    if getattr(text, "layer_types", None):
        return "sliding_attention" in text.layer_types
    return getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)


def _text_config(module: nn.Module) -> Any:
    return module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


@dataclass(frozen=True)
class CheckedAnswer:
    """A prompt and its greedy answer of n tokens.

    tolerance: (n,) differences of log-probability that rounding explains (`rounding`). eight_bit_tolerance: (n,) for a
    forward whose weights were gathered in 8 bits.
    """

    prompt: list[int]
    answer: "Generation"
    tolerance: Tensor
    eight_bit_tolerance: Tensor


def check_generator(generator: "Generator") -> list[CheckedAnswer]:
    """Compare a generator with its module's plain forward. Raises ValueError if they differ."""
    sampling = Sampling(NEW_TOKENS, temperature=0)
    checked = []
    for prompt, answer, logits in _scored_answers(generator, fixed_prompts(generator.module), sampling):
        tolerance, eight_bit_tolerance = (
            rounding(generator.module, logits, answer.token_ids, eight_bits=eight_bits) for eight_bits in (False, True)
        )
        difference = disagreement(logits, answer.token_ids, answer.logprobs, tolerance)
        if difference is not None:
            raise ValueError(_explain(generator, prompt, sampling, difference))
        checked.append(CheckedAnswer(prompt, answer, tolerance, eight_bit_tolerance))
    return checked


def compare_logprobs(
    checked: Sequence[CheckedAnswer], logprobs: Sequence[Tensor], source: str, *, eight_bits: bool = False
) -> None:
    """Compare checked answers with log-probabilities (n,) of their tokens from `source`, such as the trainer.

    `eight_bits` is whether `source` gathered its weights in 8 bits. Raises ValueError if they differ.
    """
    for one, expected in zip(checked, logprobs, strict=True):
        tolerance = one.eight_bit_tolerance if eight_bits else one.tolerance
        gaps = (torch.tensor(one.answer.logprobs) - expected.float().cpu()).abs()
        if _exceeds(gaps, tolerance):
            raise ValueError(
                f"{source} gives the generator's tokens other log-probabilities: they differ by {gaps.max():.2g}, and "
                f"rounding explains {tolerance.mean():.2g}. The rollouts are off-policy. Likely cause: a layer "
                "computes something else in training than in evaluation, or the weight sync left out weights"
            )


def fixed_prompts(module: nn.Module) -> list[list[int]]:
    """Return prompts of random token ids, the same at each call, no longer than the model's positions allow.

    Each prompt contains the padding token, which users' prompts may contain if it is also the end token.
    """
    config: Any = module.config
    vocabulary = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    limit = max_positions(module) or 1 << 30
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
    """Return the logits (tokens, V) of one forward over a sequence, without cache and padding."""
    logits: Tensor = module(input_ids=torch.tensor([token_ids], device=device), use_cache=False, **extra).logits
    return logits[0]


def counts_from_zero(module: nn.Module, device: torch.device) -> bool:
    """Return whether a module's own positions are 0, 1, ... (True for a module that takes no positions)."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return True
    prompt = fixed_prompts(module)[0]
    from_zero = plain_logits(module, device, prompt, position_ids=torch.arange(len(prompt), device=device)[None])
    own = plain_logits(module, device, prompt)
    return bool((from_zero.double() - own.double()).norm() <= SAME_COMPUTATION * own.double().norm())


def disagreement(logits: Tensor, token_ids: Sequence[int], logprobs: Sequence[float], tolerance: Tensor) -> str | None:
    """Return how a greedy answer differs from the plain forward's logits (n, V) before each token, None if it agrees.

    tolerance: (n,). Tokens whose logits differ by less than rounding are equally likely.
    """
    tokens = torch.tensor(token_ids)
    highest, best = logits.max(-1)
    below_highest = highest - logits.gather(-1, tokens[:, None])[:, 0]
    gaps = (logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] - torch.tensor(logprobs)).abs()
    for index in range(len(tokens)):
        if not bool(below_highest[index] <= 2 * tolerance[index]):
            return f"token {index} is {int(tokens[index])}, the plain forward's is {int(best[index])}"
    if _exceeds(gaps, tolerance):
        return (
            f"log-probabilities are off by {gaps.mean():.2g} on average and by {gaps.max():.2g} at most (rounding: "
            f"{tolerance.mean():.2g} on average)"
        )
    return None


def _exceeds(gaps: Tensor, tolerance: Tensor) -> bool:
    """Return whether differences (n,) exceed rounding: twice the tolerance of a token, or the tolerance on average."""
    return not bool((gaps <= 2 * tolerance).all() and gaps.mean() <= tolerance.mean())


def rounding(module: nn.Module, logits: Tensor, token_ids: Sequence[int], *, eight_bits: bool = False) -> Tensor:
    """Return the difference of log-probability that rounding explains for each token, (n,) float64.

    A log-probability is z_y - lse(z). If each logit z_j of (n, V) changes by at most eps |z_j|, it changes by at most
    eps sum_j |1[j = y] - p_j| |z_j| to first order: a likely token has a precise log-probability, however large the
    logits are. eps is the spacing of the module's precision. `eight_bits` allows for weights gathered in 8 bits.
    """
    dtype = torch.bfloat16 if eight_bits else _precision(module)
    derivative = logits.softmax(-1)
    derivative[range(len(token_ids)), list(token_ids)] -= 1
    of_logits = torch.finfo(dtype).eps * (derivative * logits).nan_to_num().abs().sum(-1)  # 0 * inf is no change
    factor = EIGHT_BIT_FACTOR if eight_bits else 1.0
    if dtype != torch.float32 and _has_routing(module):
        factor *= ROUTING_FACTOR
    return factor * (LAYER_TOLERANCE.get(dtype, LAYER_TOLERANCE[torch.bfloat16]) + of_logits)


def far_apart(module: nn.Module, logits: Tensor, plain: Tensor) -> bool:
    """Return whether two logits (n, V) differ by more than rounding explains, relative to their norms, in a row.

    If rounding may route a token to another expert, more than half of the rows must differ.
    """
    dtype = _precision(module)
    gaps = (logits.double() - plain.double()).norm(dim=-1) / plain.double().norm(dim=-1)
    may_reroute = dtype != torch.float32 and _has_routing(module)
    return not bool((gaps.median() if may_reroute else gaps.max()) <= LOGIT_TOLERANCE.get(dtype, 1e-1))


def _scored_answers(
    generator: "Generator", prompts: Sequence[list[int]], sampling: Sampling
) -> Iterator[tuple[list[int], "Generation", Tensor]]:
    """Yield (prompt, answer, the plain forward's logits (n, V) in float64 before each token of the answer)."""
    answers = generator.generate(prompts, sampling, sample_seeds=list(range(len(prompts))))
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = plain_logits(generator.module, generator.device, prompt + answer.token_ids)
        yield prompt, answer, logits[len(prompt) - 1 : -1].cpu().double()


def _explain(generator: "Generator", prompt: list[int], sampling: Sampling, difference: str) -> str:
    """Return the message of a failed check. The generator's derived weights are refreshed to find the cause."""
    cause = "the forward with a cache computes something else than the one without (attention, positions, precision)"
    if generator.mode == "vllm":
        cause = "vLLM computes this architecture differently, or the weight sync left out weights"
    generator.refresh()
    ((_, answer, logits),) = _scored_answers(generator, [prompt], sampling)
    tolerance = rounding(generator.module, logits, answer.token_ids)
    if disagreement(logits, answer.token_ids, answer.logprobs, tolerance) is None:
        cause = "the generator used weights of an earlier step: call refresh after weights have changed"
    return f"the generator does not compute {type(generator.module).__name__}: {difference}. Likely cause: {cause}"


def _has_routing(module: nn.Module) -> bool:
    """Return whether the names of submodules show that experts, or tokens to attend to, are selected by a score."""
    leaves = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return any("expert" in leaf or "indexer" in leaf for leaf in leaves)


def _precision(module: nn.Module) -> torch.dtype:
    """Return the precision of the embedding; some models compute their logits in fp32."""
    return module.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]
