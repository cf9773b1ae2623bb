"""The loss of the preference stage for a configuration, and the metrics of a training step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from engine import LossFn
from pipeline.config.stage_sections import DpoSection
from step2_dpo.batches import AnswerBatch, answer_logprobs
from step2_dpo.loss import (
    imitation_loss,
    ipo_loss,
    log_odds,
    log_ratios,
    mean_log_ratios,
    mean_logprobs,
    orpo_loss,
    sigmoid_loss,
    simpo_loss,
)


@dataclass(frozen=True)
class Objective:
    """A loss on B pairs, for 2B answers: the chosen answers first.

    score: (logprobs, reference, lengths), (2B,) each -> the score of each answer, see `step2_dpo.loss`
    margin_loss: the margins (B,) -> the sum of their losses
    sft_coef: weight of the imitation loss of the chosen answers
    beta: the reward of an answer is beta * score
    """

    score: Callable[[Tensor, Tensor, Tensor], Tensor]
    margin_loss: Callable[[Tensor], Tensor]
    sft_coef: float
    beta: float

    def loss(self, scores: Tensor, logprobs: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss, summed over pairs. Each argument is (2B,)."""
        pairs = len(scores) // 2
        total = self.margin_loss(scores[:pairs] - scores[pairs:])
        if not self.sft_coef:
            return total
        return total + self.sft_coef * imitation_loss(logprobs[:pairs], lengths[:pairs])


def objective(dpo: DpoSection) -> Objective:
    """Return the loss that `dpo.loss` names."""
    beta = dpo.beta
    sigmoid = partial(sigmoid_loss, beta=beta, label_smoothing=dpo.label_smoothing)
    objectives = {
        "sigmoid": Objective(log_ratios, sigmoid, dpo.sft_coef, beta),
        "ipo": Objective(log_ratios, partial(ipo_loss, beta=beta), dpo.sft_coef, beta),
        "length_normalized": Objective(mean_log_ratios, sigmoid, dpo.sft_coef, beta),
        "simpo": Objective(mean_logprobs, partial(simpo_loss, beta=beta, target=dpo.margin), dpo.sft_coef, beta),
        "orpo": Objective(log_odds, partial(orpo_loss, beta=beta), 1.0, beta),
    }
    return objectives[dpo.loss]


def loss_of(dpo: DpoSection) -> LossFn[AnswerBatch]:
    """Return the function that computes the loss and the metrics of a micro-batch, both summed over pairs."""
    chosen_objective, has_reference = objective(dpo), dpo.has_reference

    def loss(module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        logprobs = answer_logprobs(module, batch)
        scores = chosen_objective.score(logprobs, batch.reference, batch.lengths)
        total = chosen_objective.loss(scores, logprobs, batch.lengths)
        metrics = _metrics(logprobs.detach(), chosen_objective.beta * scores.detach())
        if has_reference:  # a pair has two answers
            metrics["drift"] = 0.5 * (logprobs.detach() - batch.reference).abs().sum()
        return total, metrics

    return loss


def _metrics(logprobs: Tensor, rewards: Tensor) -> dict[str, float | Tensor]:
    """Return the metrics of a micro-batch, summed over pairs."""
    pairs = len(rewards) // 2
    chosen, rejected = rewards.view(2, pairs)
    return {
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "chosen_logprob": logprobs[:pairs].sum(),
        "rejected_logprob": logprobs[pairs:].sum(),
    }
