"""The training loop of the supervised stages: SFT, the reward model and DPO.

A `SupervisedTask` has the loss, the batches and the evaluation of a stage. PPO has its own loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from engine import Engine, Update
from pipeline.data.batch import Movable
from pipeline.stages.stage_run import StageRun

Batch = TypeVar("Batch", bound=Movable)


@dataclass(frozen=True)
class StepBatch(Generic[Batch]):
    """The global batch of one optimizer step, of which this rank holds some micro-batches.

    count: the tokens or pairs over which the loss of the global batch is summed
    tokens: tokens of the global batch, without padding
    """

    microbatches: Sequence[Batch]
    count: int
    tokens: int


@dataclass(frozen=True)
class SupervisedTask(ABC, Generic[Batch]):
    """The examples of a supervised stage as batches, their loss and their evaluation.

    A budget is the most tokens of a micro-batch.
    """

    engine: Engine

    best_metric: ClassVar[str] = "eval_loss"
    """The metric of `evaluate` that decides which model is the best."""
    higher_is_better: ClassVar[bool] = False

    @abstractmethod
    def step(self, step: int, budget: int) -> StepBatch[Batch]:
        """Return the batch of a step, counted from 0."""

    @abstractmethod
    def largest_microbatch(self, budget: int) -> Batch:
        """Return the largest micro-batch that a step can have."""

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float | Tensor]]:
        """Return the loss and the metrics of a micro-batch, both summed over its tokens or examples."""

    @abstractmethod
    def evaluate(self, budget: int) -> dict[str, float]:
        """Return the metrics of the held-out examples; nothing if none are held out."""


def train_supervised(
    stage: StageRun, task: SupervisedTask[Batch], before_first_step: Callable[[], object] | None = None
) -> None:
    """Resume the stage, run the remaining steps, and load the best model if the stage exports the best.

    `before_first_step` is called before the first step, unless the run resumes.
    """
    done = stage.restore()
    stage.find_micro_batch_size(lambda budget: task.engine.dry_run(task.largest_microbatch(budget), task.loss))
    if done == 0 and before_first_step is not None:
        with stage.clock.phase("evaluate"):
            before_first_step()
    for step in stage.steps_left():
        batch = task.step(step - 1, stage.budget)
        with stage.clock.phase("train"):
            update = task.engine.update(batch.microbatches, task.loss, batch.count)
        stage.clock.tokens += batch.tokens
        stage.require_finite(step, update.loss, [each.input_ids for each in batch.microbatches])
        metrics = _update_metrics(task.engine, update, batch.count)
        if stage.evaluates(step):
            with stage.clock.phase("evaluate"):
                evaluation = task.evaluate(stage.budget)
            if task.best_metric in evaluation:
                stage.note_best(step, task.best_metric, evaluation[task.best_metric], higher=task.higher_is_better)
            metrics |= evaluation
        stage.log(step, metrics)
        stage.save(step)
    stage.take_best()


def _update_metrics(engine: Engine, update: Update, count: int) -> dict[str, float]:
    """Return the metrics of one optimizer step; the sums of the loss function become means over `count`."""
    means = {name: total / count for name, total in update.sums.items()}
    rates = {"lr": update.lr, "grad_norm": update.grad_norm, "skipped_steps": engine.scaler.skipped}
    return {"loss": update.loss, **means, **rates}
