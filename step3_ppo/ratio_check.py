"""The check of the first importance ratio of a rollout, which must be 1: old and new policy are the same.

A ratio that is not 1 in the first update is the clearest sign of a broken PPO (Huang et al., 2022, "The 37
implementation details of PPO"): dropout that is active, a temperature on one side only, padding that changes other
tokens, or a precision that is too low.
"""

import torch
from torch import Tensor

from pipeline.errors import UserError
from step3_ppo.microbatch import collate, policy_logprobs
from step3_ppo.models import Models
from step3_ppo.rollout import Rollout

# Mean |ratio - 1| that rounding explains, by compute precision.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
EXAMPLES = 4  # answers that are scored again to find the cause
ADVICE = {
    "dropout": "dropout is active in the actor's forward; set the model's dropout to 0",
    "temperature": "the old log-probabilities were computed at another temperature than rollout.temperature",
    "padding": "the log-probabilities of an answer depend on the padding next to it; set ppo.micro_batch_tokens so low "
    "that each micro-batch has one answer, or use another attention (model.attention=eager)",
    "dtype": "the precision is too low for this model; use engine.dtype=fp32 (or bf16 instead of fp16), or raise "
    "ppo.ratio_tolerance if you accept the difference",
}


def check_first_ratio(
    models: Models, rollout: Rollout, deviation: float, *, temperature: float, pad_id: int, tolerance: float | None
) -> None:
    """Raise UserError if the mean |ratio - 1| of the first minibatch is above the tolerance. Call before its step.

    tolerance: None uses what rounding explains in the precision of the actor
    """
    limit = TOLERANCE[models.actor.config.dtype] if tolerance is None else tolerance
    if deviation <= limit:
        return
    cause = find_cause(models, rollout, temperature=temperature, pad_id=pad_id)
    raise UserError(
        f"the first minibatch's ratio is off by {deviation:.2g} on average (at most {limit:.2g} is rounding): the "
        f"update would be wrong. Likely cause: {cause}. {ADVICE[cause]}"
    )


def find_cause(models: Models, rollout: Rollout, *, temperature: float, pad_id: int) -> str:
    """Return which of dropout, temperature, padding and dtype changes the log-probabilities of the first answers most.

    Every rank does the same work.
    """
    indices = list(range(min(EXAMPLES, len(rollout))))

    def score(groups: list[list[int]], temperature: float, *, training: bool = False) -> Tensor:
        packing = models.packing and len(groups) == 1
        found = []
        with models.actor.scoring() as module:
            module.train(training)
            for group in groups:
                batch = collate(rollout.prompts, rollout.responses, group, pad_id, packing=packing)
                found.append(policy_logprobs(module, batch.to(models.actor.device), temperature)[0])
        return torch.cat(found)

    old = rollout.logprobs[indices][rollout.response_mask[indices]]
    new = score([indices], temperature)
    changes = {
        "dropout": _distance(score([indices], temperature, training=True), new),
        "temperature": 0.0,
        "padding": _distance(score([[index] for index in indices], temperature), new),
    }
    if temperature != 1.0:
        changes["temperature"] = _distance(new, old) - _distance(score([indices], 1.0), old)
    largest = max(changes, key=lambda name: changes[name])
    return largest if changes[largest] > 1e-3 else "dtype"


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().mean().item()
