"""The loss of DPO for a configuration, and the metrics of a training step."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from engine import LossFn
from pipeline.config.schema import DpoSection
from step2_dpo.batches import AnswerBatch, answer_logprobs
from step2_dpo.loss import imitation_loss, ipo_loss, sigmoid_loss


def preference_loss(dpo: DpoSection) -> Callable[[Tensor], Tensor]:
    """Return the function that maps the margins (B,) of pairs to the sum of their losses."""
    if dpo.loss == "ipo":
        return partial(ipo_loss, beta=dpo.beta)
    return partial(sigmoid_loss, beta=dpo.beta, label_smoothing=dpo.label_smoothing)


def loss_of(dpo: DpoSection) -> LossFn[AnswerBatch]:
    """Return the function that computes the loss and the metrics of a micro-batch, both summed over pairs."""
    preference = preference_loss(dpo)

    def loss(module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        logprobs, pairs = answer_logprobs(module, batch), len(batch.lengths) // 2
        log_ratios = logprobs - batch.reference
        chosen, rejected = log_ratios.view(2, pairs)
        total = preference(chosen - rejected)
        if dpo.sft_coef:
            total = total + dpo.sft_coef * imitation_loss(logprobs[:pairs], batch.lengths[:pairs])
        return total, _metrics(logprobs.detach(), log_ratios.detach(), dpo.beta)

    return loss


def _metrics(logprobs: Tensor, log_ratios: Tensor, beta: float) -> dict[str, float | Tensor]:
    """Return the metrics of a micro-batch, summed over pairs.

    The reward of an answer is beta * log-ratio. The drift of an answer is the absolute log-ratio, in nats.
    """
    pairs = len(log_ratios) // 2
    chosen, rejected = log_ratios.view(2, pairs)
    return {
        "accuracy": (chosen > rejected).sum(),
        "margin": beta * (chosen - rejected).sum(),
        "chosen_reward": beta * chosen.sum(),
        "rejected_reward": beta * rejected.sum(),
        "chosen_logprob": logprobs[:pairs].sum(),
        "rejected_logprob": logprobs[pairs:].sum(),
        "drift": 0.5 * log_ratios.abs().sum(),  # a pair has two answers
    }
