"""What DPO minimises, as its configuration says, and the figures that tell how a step went."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from engine import LossFn
from pipeline.config.schema import DpoSection
from step2_dpo.batches import AnswerBatch, answer_logprobs
from step2_dpo.loss import imitation_loss, ipo_loss, sigmoid_loss


def preference_loss(dpo: DpoSection) -> Callable[[Tensor], Tensor]:
    """Leads (B,) -> the sum of their losses."""
    if dpo.loss == "ipo":
        return partial(ipo_loss, beta=dpo.beta)
    return partial(sigmoid_loss, beta=dpo.beta, label_smoothing=dpo.label_smoothing)


def loss_of(dpo: DpoSection) -> LossFn[AnswerBatch]:
    """The summed loss of a micro-batch, and its figures, summed over pairs."""
    preference = preference_loss(dpo)

    def loss(module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        logprobs, pairs = answer_logprobs(module, batch), len(batch.lengths) // 2
        moved = logprobs - batch.reference
        chosen, rejected = moved.view(2, pairs)
        total = preference(chosen - rejected)
        if dpo.sft_coef:
            total = total + dpo.sft_coef * imitation_loss(logprobs[:pairs], batch.lengths[:pairs])
        return total, _figures(logprobs.detach(), moved.detach(), dpo.beta)

    return loss


def _figures(logprobs: Tensor, moved: Tensor, beta: float) -> dict[str, float | Tensor]:
    """Rewards are beta * log-ratio; drift is how far an answer's log-probability has moved either way, nats."""
    pairs = len(moved) // 2
    chosen, rejected = moved.view(2, pairs)
    return {
        "accuracy": (chosen > rejected).sum(),
        "margin": beta * (chosen - rejected).sum(),
        "chosen_reward": beta * chosen.sum(),
        "rejected_reward": beta * rejected.sum(),
        "chosen_logprob": logprobs[:pairs].sum(),
        "rejected_logprob": logprobs[pairs:].sum(),
        "drift": 0.5 * moved.abs().sum(),  # of two answers a pair
    }
