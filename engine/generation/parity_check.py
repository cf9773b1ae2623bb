"""Checks of a model: whether the slot cache supports it, and whether the generator computes it (parity check).

A configuration shows which layers the slot cache cannot run and how long a sequence may be.

The check decodes fixed prompts and scores the answers by the plain forward. Without the check, a generator that
computes another model would train the policy on that model's text, and no error would stop the run. Each sampled token
must be the most likely one of the module's plain forward, with the same log-probability up to rounding. A failed check
names the first layer that differs and the likely cause.

The decode loop uses the same comparison when it decides whether it supports a model. All tolerances are for
log-probabilities and hidden states that were computed twice, in another order of operations.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.generation.sampling import Sampling
from engine.parallel import zero

if TYPE_CHECKING:
    from engine.generation.generator import Generation, Generator

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
NEW_TOKENS = 8
LENGTHS = (5, 12, 10)  # tokens of the prompts; unequal lengths reveal swapped slots and wrong padding
# Mean differences of log-probability that rounding explains for logits up to 1. They grow with the largest logit. The
# difference of one token may be twice as large. Measured: an eighth of the bound in bf16, a third with large adapters
# merged.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EIGHT_BIT_TOLERANCE = 9e-2  # for weights gathered in 8 bits; measured: two to four times the difference of bf16
ROUTING_FACTOR = 4.0  # rounding may route a token to another expert
HIDDEN_STATE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative
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
    """A prompt and its greedy answer. `tolerance` bounds the mean difference of log-probability to another forward.

    `eight_bit_tolerance` is the bound for a forward whose weights were gathered in 8 bits.
    """

    prompt: list[int]
    answer: "Generation"
    tolerance: float
    eight_bit_tolerance: float


def check_generator(generator: "Generator") -> list[CheckedAnswer]:
    """Compare a generator with its module's plain forward. Raises ValueError if they differ."""
    prompts = fixed_prompts(generator.module)
    sampling = Sampling(NEW_TOKENS, temperature=0)
    answers = generator.generate(prompts, sampling, sample_seeds=list(range(len(prompts))))
    checked = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = _answer_logits(generator, prompt, answer.token_ids)
        tolerance = tolerance_of(generator.module, logits)
        difference = disagreement(logits.double(), answer.token_ids, answer.logprobs, tolerance)
        if difference is not None:
            raise ValueError(_explain(generator, prompt, sampling, difference))
        eight_bit_tolerance = tolerance_of(generator.module, logits, eight_bits=True)
        checked.append(CheckedAnswer(prompt, answer, tolerance, eight_bit_tolerance))
    return checked


def compare_logprobs(
    checked: Sequence[CheckedAnswer], logprobs: Sequence[Tensor], source: str, *, eight_bits: bool = False
) -> None:
    """Compare checked answers with log-probabilities (n,) of their tokens from `source`, such as the trainer.

    `eight_bits` is whether `source` gathered its weights in 8 bits. Raises ValueError if they differ.
    """
    for checked_answer, expected in zip(checked, logprobs, strict=True):
        gap = (torch.tensor(checked_answer.answer.logprobs) - expected.float().cpu()).abs()
        tolerance = checked_answer.eight_bit_tolerance if eight_bits else checked_answer.tolerance
        if not bool((gap <= 2 * tolerance).all() and gap.mean() <= tolerance):
            raise ValueError(
                f"{source} gives the generator's tokens other log-probabilities: they differ by {gap.max():.2g}, and "
                f"rounding explains {tolerance:.2g}. The rollouts are off-policy. Likely cause: a layer computes "
                "something else in training than in evaluation, or the weight sync left out weights"
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


def disagreement(logits: Tensor, token_ids: Sequence[int], logprobs: Sequence[float], tolerance: float) -> str | None:
    """Return how a greedy answer differs from the plain forward's logits (n, V) before each token, None if it agrees.

    Tokens whose logits differ by less than rounding are equally likely.
    """
    tokens = torch.tensor(token_ids, device=logits.device)
    highest, best = logits.max(-1)
    below_highest = highest - logits.gather(-1, tokens[:, None])[:, 0]
    gaps = (logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu() - torch.tensor(logprobs)).abs()
    for index in range(len(tokens)):
        if not bool(below_highest[index] <= 2 * tolerance):
            return f"token {index} is {int(tokens[index])}, the plain forward's is {int(best[index])}"
        if not bool(gaps[index] <= 2 * tolerance):
            return f"the log-probability of token {index} is off by {gaps[index]:.2g} (rounding: {tolerance:.2g})"
    if not bool(gaps.mean() <= tolerance):
        return f"log-probabilities are off by {gaps.mean():.2g} on average (rounding: {tolerance:.2g})"
    return None


def tolerance_of(module: nn.Module, logits: Tensor, *, eight_bits: bool = False) -> float:
    """Return the mean difference of log-probability that rounding explains, for the module's precision and logits.

    `eight_bits` allows for weights that were gathered in 8 bits.
    """
    dtype = _precision(module)
    rounding = (EIGHT_BIT_TOLERANCE if eight_bits else TOLERANCE.get(dtype, 3e-2)) * max(1.0, logits.abs().max().item())
    return rounding * (ROUTING_FACTOR if (eight_bits or dtype != torch.float32) and _has_routing(module) else 1.0)


def far_apart(module: nn.Module, logits: Tensor, plain: Tensor) -> bool:
    """Return whether two logits (n, V) differ by more than rounding explains, relative to their norms, in a row.

    If rounding may route a token to another expert, more than half of the rows must differ.
    """
    dtype = _precision(module)
    gaps = (logits.double() - plain.double()).norm(dim=-1) / plain.double().norm(dim=-1)
    may_reroute = dtype != torch.float32 and _has_routing(module)
    return not bool((gaps.median() if may_reroute else gaps.max()) <= LOGIT_TOLERANCE.get(dtype, 1e-1))


def first_difference(generator: "Generator", prompt: list[int], sampling: Sampling) -> str | None:
    """Return the name of the first block whose output differs between generating and the plain forward."""
    answers: list[Generation] = []
    with generator.without_graphs():
        generated = _block_outputs(
            generator.module, lambda: answers.extend(generator.generate([prompt], sampling, [0]))
        )
    plain = _block_outputs(generator.module, lambda: _answer_logits(generator, prompt, answers[0].token_ids))
    names = {module: name for name, module in generator.module.named_modules()}
    for block, states in plain.items():
        if block not in generated:
            continue
        tokens = min(generated[block].shape[1], states.shape[1])
        a, b = generated[block][:, :tokens].double(), states[:, :tokens].double()
        if not bool((a - b).norm() <= HIDDEN_STATE_TOLERANCE.get(states.dtype, 5e-2) * b.norm()):
            return names[block]
    return None


def _explain(generator: "Generator", prompt: list[int], sampling: Sampling, difference: str) -> str:
    """Return the message of a failed check. The generator's derived weights are refreshed to find the cause."""
    layer = first_difference(generator, prompt, sampling) or "none, so the head or the sampling differs"
    cause = "the forward with a cache computes something else than the one without (attention, positions, precision)"
    with generator.without_graphs():
        if _agrees(generator, prompt, sampling):
            cause = "the CUDA graph of a decode step computes something else than the modules do"
    generator.refresh()
    if _agrees(generator, prompt, sampling):
        cause = "the generator used weights of an earlier step: call refresh after weights have changed"
    name = type(generator.module).__name__
    return (
        f"the generator does not compute {name}: {difference}. First layer that differs: {layer}. Likely cause: {cause}"
    )


def _agrees(generator: "Generator", prompt: list[int], sampling: Sampling) -> bool:
    answer = generator.generate([prompt], sampling, [0])[0]
    logits = _answer_logits(generator, prompt, answer.token_ids)
    tolerance = tolerance_of(generator.module, logits)
    return disagreement(logits.double(), answer.token_ids, answer.logprobs, tolerance) is None


def _answer_logits(generator: "Generator", prompt: list[int], answer: list[int]) -> Tensor:
    """Return the plain forward's logits (n, V) before each token of an answer."""
    return plain_logits(generator.module, generator.device, prompt + answer)[len(prompt) - 1 : -1]


def _block_outputs(module: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, Tensor]:
    """Return the hidden states (1, tokens, D) that each block computed during `run`, tokens of all forwards joined."""
    outputs: dict[nn.Module, list[Tensor]] = {}

    def record(block: nn.Module, _: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor) and states.ndim == 3:
            outputs.setdefault(block, []).append(states.detach().clone())

    handles = [block.register_forward_hook(record) for block in zero.units(module)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {block: torch.cat(states, dim=1) for block, states in outputs.items()}


def _has_routing(module: nn.Module) -> bool:
    """Return whether the names of submodules show that experts, or tokens to attend to, are selected by a score."""
    leaves = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return any("expert" in leaf or "indexer" in leaf for leaf in leaves)


def _precision(module: nn.Module) -> torch.dtype:
    """Return the precision of the embedding; some models compute their logits in fp32."""
    return module.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]
