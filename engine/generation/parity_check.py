"""The parity check: whether a generator computes the model of its module.

The check decodes fixed prompts and scores the answers by the plain forward. Without the check, a generator that
computes another model would train the policy on that model's text, and no error would stop the run. Each sampled token
must be the most likely one of the module's plain forward, with the same log-probability up to rounding. A failed check
names the likely cause.

All tolerances are for numbers that were computed twice, in another order of operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.generation.generator import Generation, Generator
from engine.generation.model_support import NEW_TOKENS, fixed_prompts, has_routing, plain_logits, precision
from engine.generation.sampling import Sampling

# The difference of log-probability that the layers' rounding explains; `rounding` adds that of the logits. Measured in
# bf16, 12 layers, random weights: means of 0.01 to 0.07 for largest logits of 5 to 60, half of the sum or less.
LAYER_TOLERANCE = {torch.float32: 2e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
EIGHT_BIT_FACTOR = 3.0  # of bf16's difference, for weights gathered in 8 bits
ROUTING_FACTOR = 4.0  # rounding may route a token to another expert


@dataclass(frozen=True)
class CheckedAnswer:
    """A prompt and its greedy answer of n tokens.

    tolerance: (n,) differences of log-probability that rounding explains (`rounding`). eight_bit_tolerance: (n,) for a
    forward whose weights were gathered in 8 bits.
    """

    prompt: list[int]
    answer: Generation
    tolerance: Tensor
    eight_bit_tolerance: Tensor


def check_generator(generator: Generator) -> list[CheckedAnswer]:
    """Compare a generator with its module's plain forward. Raises ValueError if they differ."""
    module, prompts, checked = generator.module, fixed_prompts(generator.module), []
    answers = generator.generate(prompts, Sampling(NEW_TOKENS, temperature=0), list(range(len(prompts))))
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = plain_logits(module, generator.device, prompt + answer.token_ids)[len(prompt) - 1 : -1].cpu().double()
        tolerance, eight_bit_tolerance = (
            rounding(module, logits, answer.token_ids, eight_bits=eight_bits) for eight_bits in (False, True)
        )
        difference = disagreement(logits, answer.token_ids, answer.logprobs, tolerance)
        if difference is not None:
            cause = "the forward with a cache computes something else than the one without (attention, positions)"
            if generator.mode == "vllm":
                cause = "vLLM computes this architecture differently"
            raise ValueError(
                f"the generator does not compute {type(module).__name__}: {difference}. Likely cause: {cause}, or the "
                "generator used weights of an earlier step (call refresh after weights have changed)"
            )
        checked.append(CheckedAnswer(prompt, answer, tolerance, eight_bit_tolerance))
    return checked


def compare_logprobs(checked: Sequence[CheckedAnswer], logprobs: Sequence[Tensor], *, eight_bits: bool = False) -> None:
    """Compare checked answers with log-probabilities (n,) of their tokens from the trainer's forward.

    `eight_bits` is whether the trainer gathered its weights in 8 bits. Raises ValueError if they differ.
    """
    for one, expected in zip(checked, logprobs, strict=True):
        tolerance = one.eight_bit_tolerance if eight_bits else one.tolerance
        gaps = (torch.tensor(one.answer.logprobs) - expected.float().cpu()).abs()
        if _exceeds(gaps, tolerance):
            raise ValueError(
                "the trainer's forward gives the generator's tokens other log-probabilities: they differ by "
                f"{gaps.max():.2g}, and rounding explains {tolerance.mean():.2g}. The rollouts are off-policy. Likely "
                "cause: a layer computes something else in training than in evaluation, or the weight sync left out "
                "weights"
            )


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
    dtype = torch.bfloat16 if eight_bits else precision(module)
    derivative = logits.softmax(-1)
    derivative[range(len(token_ids)), list(token_ids)] -= 1
    of_logits = torch.finfo(dtype).eps * (derivative * logits).nan_to_num().abs().sum(-1)  # 0 * inf is no change
    factor = EIGHT_BIT_FACTOR if eight_bits else 1.0
    if dtype != torch.float32 and has_routing(module):
        factor *= ROUTING_FACTOR
    return factor * (LAYER_TOLERANCE.get(dtype, LAYER_TOLERANCE[torch.bfloat16]) + of_logits)
