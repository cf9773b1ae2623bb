"""Is the fast generator the model? A few fixed prompts, decoded greedily and scored again by the plain forward.

Wrong text out of a fast generator is the oldest complaint about hybrid engines: it trains a policy on what another
model said, and nothing stops. So the tokens must be those that transformers' own forward finds likeliest, and carry its
log-probabilities, within what rounding explains; else the check names the first layer that differs, and the likely
cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation.agreement import NEW_TOKENS, RELATIVE, disagreement, fixed_prompts, plain_logits, tolerance_of
from engine.generation.rollouts import Generation, Rollouts
from engine.generation.sampling import Sampling
from engine.parallel import zero


@dataclass(frozen=True)
class Checked:
    """A prompt with what was said to it, greedily; its log-probabilities may be off by `tolerance` on average, by
    `tolerance_8` from those of a forward with weights that were gathered in 8 bits.
    """

    prompt: list[int]
    answer: Generation
    tolerance: float
    tolerance_8: float


def selfcheck(rollouts: Rollouts) -> list[Checked]:
    """Check a generator against its own module's plain forward. Raises ValueError where they differ."""
    prompts = fixed_prompts(rollouts.module)
    how = Sampling(NEW_TOKENS, temperature=0)
    answers = rollouts.generate(prompts, how, streams=list(range(len(prompts))))
    checked = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = _before_answer(rollouts, prompt, answer.token_ids)
        tolerance = tolerance_of(rollouts.module, logits)
        found = disagreement(logits.double(), answer.token_ids, answer.logprobs, tolerance)
        if found is not None:
            raise ValueError(_explain(rollouts, prompt, how, found))
        checked.append(Checked(prompt, answer, tolerance, tolerance_of(rollouts.module, logits, eight_bits=True)))
    return checked


def compare(checked: Sequence[Checked], logprobs: Sequence[Tensor], source: str, *, eight_bits: bool = False) -> None:
    """Hold checked answers against log-probabilities (n,) from `source`, of weights gathered in 8 bits if so. Raises
    ValueError where they differ.
    """
    for one, theirs in zip(checked, logprobs, strict=True):
        gap = (torch.tensor(one.answer.logprobs) - theirs.float().cpu()).abs()
        tolerance = one.tolerance_8 if eight_bits else one.tolerance
        if not bool((gap <= 2 * tolerance).all() and gap.mean() <= tolerance):
            raise ValueError(
                f"{source} gives the generator's tokens other log-probabilities: they differ by {gap.max():.2g}, "
                f"rounding explains {tolerance:.2g}. Rollouts are off-policy. Likely cause: a layer that computes "
                "otherwise in training than in evaluation, or weights that the flip did not carry over"
            )


def _before_answer(rollouts: Rollouts, prompt: list[int], answer: list[int]) -> Tensor:
    """(n, V): the plain forward's logits before each token of an answer."""
    return plain_logits(rollouts.module, rollouts.device, prompt + answer)[len(prompt) - 1 : -1]


def _explain(rollouts: Rollouts, prompt: list[int], how: Sampling, found: str) -> str:
    name = type(rollouts.module).__name__
    layer = first_difference(rollouts, prompt, how) or "none: the hidden states agree, so the head or the sampling"
    cause = "the model's forward with a cache differs from the one without (positions, dropout, or its precision)"
    if rollouts.fallback is None:
        with rollouts.through_modules():
            if _agrees(rollouts, prompt, how):
                return f"the generator is not the model {name}: {found}. Its CUDA graphs compute something else"
        if _agrees(Rollouts(rollouts.module, rollouts.device, slots=False), prompt, how):
            cause = "its attention does something that attention over the slot cache does not"
        anew = Rollouts(rollouts.module, rollouts.device)
        if anew.fallback is None and _agrees(anew, prompt, how):
            cause = "the generator worked with weights of an earlier step"
    return f"the generator is not the model {name}: {found}. First layer that differs: {layer}. Likely cause: {cause}"


def _agrees(rollouts: Rollouts, prompt: list[int], how: Sampling) -> bool:
    answer = rollouts.generate([prompt], how, [0])[0]
    logits = _before_answer(rollouts, prompt, answer.token_ids)
    tolerance = tolerance_of(rollouts.module, logits)
    return disagreement(logits.double(), answer.token_ids, answer.logprobs, tolerance) is None


def first_difference(rollouts: Rollouts, prompt: list[int], how: Sampling) -> str | None:
    """The name of the first block whose output differs between generating and the plain forward."""
    answers: list[Generation] = []
    with rollouts.through_modules():
        ours = _block_outputs(rollouts.module, lambda: answers.extend(rollouts.generate([prompt], how, [0])))
    theirs = _block_outputs(rollouts.module, lambda: _before_answer(rollouts, prompt, answers[0].token_ids))
    names = {module: name for name, module in rollouts.module.named_modules()}
    for block, plain in theirs.items():
        if block not in ours:
            continue
        fast = ours[block]
        tokens = min(fast.shape[1], plain.shape[1])
        a, b = fast[:, :tokens].double(), plain[:, :tokens].double()
        if not bool((a - b).norm() <= RELATIVE.get(plain.dtype, 5e-2) * b.norm()):
            return names[block]
    return None


def _block_outputs(module: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, Tensor]:
    """What each block gave while `run` ran, its tokens one after the other: (1, tokens, D) by block."""
    outputs: dict[nn.Module, list[Tensor]] = {}

    def keep(block: nn.Module, _: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor) and states.ndim == 3:  # (1, tokens, D); what else a block may give says no more
            outputs.setdefault(block, []).append(states.detach().clone())

    handles = [block.register_forward_hook(keep) for block in zero.units(module)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {block: torch.cat(parts, dim=1) for block, parts in outputs.items()}
