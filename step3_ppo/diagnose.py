"""The ratio of a rollout's first minibatch must be 1: old and new policy are the same. If it is not, why?

Off-policy ratios on the first update are the sharpest sign of a broken PPO (Huang et al., 2022, "The 37 implementation
details of PPO"): dropout left on, a temperature forgotten on one side, padding that leaks, or too coarse a precision.
"""

import torch
from torch import Tensor

from pipeline.errors import UserError
from step3_ppo.models import Models
from step3_ppo.rollout import Rollout
from step3_ppo.rows import policy_logprobs, rows

# Mean |ratio - 1| that rounding alone explains, by compute precision.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
SUSPECTS = {
    "dropout": "dropout is on in the actor's forward; set the model's dropout to 0",
    "temperature": "the old log-probabilities were taken at another temperature than rollout.temperature",
    "padding": "rows next to longer ones score otherwise than alone: this model lets padding leak; use "
    "ppo.micro_batch_tokens small enough for one row, or another attention (model.attention=eager)",
    "dtype": "the precision is too coarse for this model: use engine.dtype=fp32 (or bf16 instead of fp16), or raise "
    "ppo.ratio_tolerance if you accept it",
}


def check_first_ratio(
    models: Models, rollout: Rollout, deviation: float, *, temperature: float, pad_id: int, tolerance: float | None
) -> None:
    """Stop if the mean |ratio - 1| of the first minibatch exceeds the tolerance. To be called before its step."""
    limit = TOLERANCE[models.actor.config.dtype] if tolerance is None else tolerance
    if deviation <= limit:
        return
    cause = find_cause(models, rollout, temperature=temperature, pad_id=pad_id)
    raise UserError(
        f"the first minibatch's ratio is off by {deviation:.2g} on average (at most {limit:.2g} is rounding): the "
        f"update would be wrong. Likely cause: {cause}. {SUSPECTS[cause]}"
    )


def find_cause(models: Models, rollout: Rollout, *, temperature: float, pad_id: int) -> str:
    """Which of dropout, temperature, padding, dtype moves the first answers' log-probabilities.

    Every rank does the same work.
    """
    places = list(range(min(4, len(rollout))))
    together = rows(rollout.prompts, rollout.responses, places, pad_id, packing=models.pack)

    def score(temperature: float, *, training: bool = False, alone: bool = False) -> Tensor:
        groups = [rows(rollout.prompts, rollout.responses, [i], pad_id) for i in places] if alone else [together]
        with models.actor.scoring() as module:
            module.train(training)
            return torch.cat([policy_logprobs(module, group, temperature)[0] for group in groups])

    kept = rollout.logprobs[places][rollout.response_mask[places]]
    base = score(temperature)
    shifts = {
        "dropout": _gap(score(temperature, training=True), base),
        "temperature": _gap(score(temperature), kept) - _gap(score(1.0), kept) if temperature != 1.0 else 0.0,
        "padding": _gap(score(temperature, alone=True), base),
    }
    worst = max(shifts, key=lambda name: shifts[name])
    return worst if shifts[worst] > 1e-3 else "dtype"


def _gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().mean().item()
