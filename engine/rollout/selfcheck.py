"""Is the fast generator the model? A few fixed prompts, decoded greedily and scored again by the plain forward.

Wrong text out of a fast generator is the oldest complaint about hybrid engines: it trains a policy on what another
model said, and nothing stops. So the tokens must be those that transformers' own forward finds likeliest, and carry its
log-probabilities, within what rounding explains; else the check names the first layer that differs, and the likely
cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel import zero
from engine.rollout.decoder import Generation, Rollouts
from engine.rollout.sampling import Sampling

LENGTHS = (5, 12)  # tokens of the prompts: unequal, so that a slot taken for another shows
NEW_TOKENS = 8
# Mean differences of log-probability that rounding explains, for logits up to 1; they grow with the largest logit. A
# single token's may be twice as large. Measured: an eighth of it in bf16, a third with large adapters merged.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EXPERTS = 4.0  # times as much where rounding may send a token to another expert
LAYER_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative, of hidden states


@dataclass(frozen=True)
class Checked:
    """A prompt with what was said to it, greedily; its log-probabilities may be off by `tolerance` on average."""

    prompt: list[int]
    answer: Generation
    tolerance: float


def selfcheck(rollouts: Rollouts) -> list[Checked]:
    """Check a generator against its own module's plain forward. Raises ValueError where they differ."""
    prompts = fixed_prompts(rollouts.module)
    how = Sampling(NEW_TOKENS, temperature=0)
    answers = rollouts.generate(prompts, how, streams=list(range(len(prompts))))
    checked = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = _plain_logits(rollouts.module, rollouts.device, prompt, answer.token_ids)
        tolerance = _tolerance(rollouts.module, logits)
        found = disagreement(logits.double(), answer, tolerance)
        if found is not None:
            raise ValueError(_explain(rollouts, prompt, how, found))
        checked.append(Checked(prompt, answer, tolerance))
    return checked


def compare(checked: Sequence[Checked], logprobs: Sequence[Tensor], source: str) -> None:
    """Hold checked answers against log-probabilities (n,) from `source`. Raises ValueError where they differ."""
    for one, theirs in zip(checked, logprobs, strict=True):
        gap = (torch.tensor(one.answer.logprobs) - theirs.float().cpu()).abs()
        if not bool((gap <= 2 * one.tolerance).all() and gap.mean() <= one.tolerance):
            raise ValueError(
                f"{source} gives the generator's tokens other log-probabilities: they differ by {gap.max():.2g}, "
                f"rounding explains {one.tolerance:.2g}. Rollouts are off-policy. Likely cause: a layer that computes "
                "otherwise in training than in evaluation, or weights that the flip did not carry over"
            )


def fixed_prompts(module: nn.Module) -> list[list[int]]:
    """Token ids from all over the vocabulary, the same at each call, as long as the model has positions for."""
    config: Any = module.config
    vocabulary = module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max(1, limit - NEW_TOKENS)) for length in LENGTHS]
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def disagreement(logits: Tensor, answer: Generation, tolerance: float) -> str | None:
    """What is wrong with a greedy answer, by the plain forward's logits (n, V) before each of its tokens."""
    tokens = torch.tensor(answer.token_ids, device=logits.device)
    likeliest, best = logits.max(-1)
    short = likeliest - logits.gather(-1, tokens[:, None])[:, 0]
    gaps = (logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu() - torch.tensor(answer.logprobs)).abs()
    for place in range(len(tokens)):
        if not bool(short[place] <= 2 * tolerance):
            return f"token {place} is {int(tokens[place])}, the plain forward says {int(best[place])}"
        if not bool(gaps[place] <= 2 * tolerance):
            return f"the log-probability of token {place} is off by {gaps[place]:.2g} (rounding: {tolerance:.2g})"
    if not bool(gaps.mean() <= tolerance):
        return f"log-probabilities are off by {gaps.mean():.2g} on average (rounding: {tolerance:.2g})"
    return None


@torch.inference_mode()
def _plain_logits(module: nn.Module, device: torch.device, prompt: list[int], answer: list[int]) -> Tensor:
    """(n, V): the whole sequence at once through the module as it is, no cache, no padding."""
    logits: Tensor = module(input_ids=torch.tensor([prompt + answer], device=device), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1]


def _explain(rollouts: Rollouts, prompt: list[int], how: Sampling, found: str) -> str:
    name = type(rollouts.module).__name__
    layer = first_difference(rollouts, prompt, how) or "none: the hidden states agree, so the head or the sampling"
    padded = Rollouts(rollouts.module, rollouts.device, slots=False)
    cause = "the model's forward with a cache differs from the one without (positions, dropout, or its precision)"
    with rollouts.through_modules():
        if _agrees(rollouts, prompt, how):
            return f"the generator is not the model {name}: {found}. Its recorded steps do not what its modules do"
    if rollouts.fallback is None and _agrees(padded, prompt, how):
        cause = "its attention does something that attention over the slot cache does not"
    if rollouts.fallback is None and _agrees(Rollouts(rollouts.module, rollouts.device), prompt, how):
        cause = "the generator worked with weights of an earlier step"
    return f"the generator is not the model {name}: {found}. First layer that differs: {layer}. Likely cause: {cause}"


def _agrees(rollouts: Rollouts, prompt: list[int], how: Sampling) -> bool:
    answer = rollouts.generate([prompt], how, [0])[0]
    logits = _plain_logits(rollouts.module, rollouts.device, prompt, answer.token_ids)
    return disagreement(logits.double(), answer, _tolerance(rollouts.module, logits)) is None


def _tolerance(module: nn.Module, logits: Tensor) -> float:
    """What rounding explains of a log-probability, by the logits' precision and size."""
    config: Any = module.config
    text = config.get_text_config(decoder=True)
    mixture = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    rounding = TOLERANCE.get(logits.dtype, 3e-2) * max(1.0, logits.abs().max().item())
    return rounding * (EXPERTS if mixture and logits.dtype != torch.float32 else 1.0)


def first_difference(rollouts: Rollouts, prompt: list[int], how: Sampling) -> str | None:
    """The name of the first block whose output differs between generating and the plain forward."""
    answers: list[Generation] = []
    with rollouts.through_modules():
        ours = _block_outputs(rollouts.module, lambda: answers.extend(rollouts.generate([prompt], how, [0])))
    token_ids = answers[0].token_ids
    theirs = _block_outputs(
        rollouts.module, partial(_plain_logits, rollouts.module, rollouts.device, prompt, token_ids)
    )
    names = {module: name for name, module in rollouts.module.named_modules()}
    for block, plain in theirs.items():
        fast = ours[block]
        tokens = min(fast.shape[1], plain.shape[1])
        a, b = fast[:, :tokens].double(), plain[:, :tokens].double()
        if not bool((a - b).norm() <= LAYER_TOLERANCE.get(plain.dtype, 5e-2) * b.norm()):
            return names[block]
    return None


def _block_outputs(module: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, Tensor]:
    """What each block gave while `run` ran, its tokens one after the other: (1, tokens, D) by block."""
    outputs: dict[nn.Module, list[Tensor]] = {}

    def keep(block: nn.Module, _: Any, output: Any) -> None:
        outputs.setdefault(block, []).append((output[0] if isinstance(output, tuple) else output).detach().clone())

    handles = [block.register_forward_hook(keep) for block in zero.units(module)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {block: torch.cat(parts, dim=1) for block, parts in outputs.items()}
