"""Stage 2 without a reward model, DPO: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import DpoSection
from pipeline.data.batch import batch_indices
from pipeline.data.encode import LabelledItem, PairItem, encode_labelled, encode_preferences
from pipeline.data.load import StageRecords
from pipeline.data.microbatches import longer_side
from pipeline.data.records import labelled_answers
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluator, compare_models, metrics_of, write_table
from pipeline.evaluation.judge import load_judge, load_pair_judge
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.stage_models import actor_folder, policy_to_tune, require_context
from pipeline.stages.data import evaluation_prompts, examples, log_undecided, stage_records
from pipeline.stages.start import (
    open_stage,
    optimizer_config,
    plan_stage,
    prepare_generation,
    sampling,
)
from pipeline.stages.supervised import StepBatch, SupervisedTask, train_supervised
from step2_dpo.batches import AnswerBatch, Pairs
from step2_dpo.evaluate import held_out_figures, held_out_shares, pair_logprobs, with_reference
from step2_dpo.kto import LabelBatches, examples_of
from step2_dpo.objective import loss_of

Item = TypeVar("Item")


class Batches(Protocol):
    """The examples of the stage as batches: `PairBatches` or `LabelBatches`."""

    @property
    def longest(self) -> int:
        """The most tokens, padding included, of a micro-batch with a single example."""

    def read_reference(self, folder: Path, budget: int) -> "Batches": ...

    def step(self, step: int, budget: int) -> StepBatch[AnswerBatch]: ...

    def largest_microbatch(self, budget: int) -> AnswerBatch: ...

    def evaluate(self, budget: int) -> tuple[dict[str, float], dict[str, Any]]: ...

    def loss(self, module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]: ...


@dataclass(frozen=True)
class Form:
    """What the stage learns from, pairs or labelled answers: how to select, encode and batch the records."""

    select: Callable[[StageRecords], StageRecords]
    encode: Callable[..., Any]
    batches: Callable[..., Batches]


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export the policy. `folder` is RUN/dpo."""
    source, tokenizer = policy_to_tune(config, actor_folder(config, folder.parent))
    require_context(config, "dpo", source)
    form = PAIRS if config.dpo.reads_pairs else LABELS
    records = form.select(stage_records(config, "dpo"))
    data = examples("dpo", config.dpo, records, partial(form.encode, tokenizer, max_length=config.dpo.max_length))
    prompts, judge = evaluation_prompts(config, tokenizer), load_judge(config)
    del records  # frees the texts
    plan = plan_stage(config, "dpo", folder, data.train, policy=source)
    config, section = plan.config, plan.config.dpo
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = verify(engine, max_length=section.max_length).packing
    schedule = [batch_indices(len(data.train), section.batch_size, config.seed, step) for step in range(plan.steps)]
    train, schedule = select_used(data.train, schedule)
    batches = form.batches(engine, section, train, data.held_out, schedule, packing, tokenizer.pad_id)
    settings = sampling(config.rollout, tokenizer, seed=EVALUATION_SEED)
    evaluator = Evaluator(prompts, tokenizer, settings, config.temperatures, judge)
    with open_stage(plan, "dpo", folder, {"policy": engine}, best_metric="eval_loss", longest=batches.longest) as stage:
        if section.has_reference:
            with stage.clock.phase("reference"):  # the policy is the reference until its first step
                batches = batches.read_reference(folder, stage.budget)
        task = SupervisedTask(
            engine,
            batches.loss,
            batches.step,
            batches.largest_microbatch,
            evaluate=lambda budget: batches.evaluate(budget)[0],
            best_metric="eval_loss",
            before_first_step=lambda: write_table(prompts, {"sft": evaluator.evaluate(engine)}, folder),
        )
        train_supervised(stage, task)
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model", lora=section.lora)
        with stage.clock.phase("evaluate"):
            results = compare_models(
                prompts, folder, evaluator.evaluate(engine), evaluator.grade, load_pair_judge(config)
            )
            _, metrics = batches.evaluate(stage.budget)
        by_model = {name: metrics_of(evaluations) for name, evaluations in results.items()}
        summary = {**by_model["dpo"], "held_out": by_model, "skipped": data.skipped, "packing": packing}
        stage.finish({**metrics, **summary})


@dataclass(frozen=True)
class PairBatches:
    """The training and held-out pairs as batches.

    schedule: for each step, the indices of its pairs in `train`
    packing: a micro-batch is one row without padding
    """

    engine: Engine
    section: DpoSection
    train: Pairs
    held_out: Pairs
    schedule: Sequence[Sequence[int]]
    packing: bool
    pad_id: int

    @property
    def longest(self) -> int:
        """The tokens of the longest pair, whose sides are padded to the same length."""
        return 2 * max(longer_side(pair) for pair in self.train.items)

    def read_reference(self, folder: Path, budget: int) -> "PairBatches":
        """Return these batches with the log-probabilities under the reference: the policy before its first step."""
        read = partial(pair_logprobs, self.engine, budget=budget, packing=self.packing, pad_id=self.pad_id)
        pairs = with_reference(folder, {"train": self.train.items, "held_out": self.held_out.items}, read)
        return replace(self, train=pairs["train"], held_out=pairs["held_out"])

    def step(self, step: int, budget: int) -> StepBatch[AnswerBatch]:
        """Return the batch of a step, counted from 0. The loss is averaged over its pairs."""
        indices = self.schedule[step]
        batches, _ = self.train.micro_batches(indices, budget=budget, packing=self.packing, pad_id=self.pad_id)
        pairs = [self.train.items[i] for i in indices]
        return StepBatch(batches, len(indices), sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

    def largest_microbatch(self, budget: int) -> AnswerBatch:
        """Return the largest micro-batch that a step can have."""
        return self.train.largest_batch(budget=budget, packing=self.packing, pad_id=self.pad_id)

    def loss(self, module: nn.Module, batch: AnswerBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        """Return the loss and the metrics of a micro-batch, both summed over pairs."""
        return loss_of(self.section)(module, batch)

    def evaluate(self, budget: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of the held-out pairs for a line of metrics.jsonl, and those for summary.json."""
        if not len(self.held_out):
            return {}, {"eval_pairs": 0}
        logprobs: Tensor = pair_logprobs(
            self.engine, self.held_out.items, budget=budget, packing=self.packing, pad_id=self.pad_id
        )
        metrics = held_out_figures(self.held_out, logprobs, self.section)
        return metrics, {**metrics, **held_out_shares(self.held_out, logprobs, self.section)}


def select_used(items: Sequence[Item], schedule: Sequence[Sequence[int]]) -> tuple[list[Item], list[list[int]]]:
    """Return the items that occur in `schedule`, and the schedule with their new indices.

    The reference model scores only these items.
    """
    used = sorted({index for indices in schedule for index in indices})
    new_index = {index: position for position, index in enumerate(used)}
    return [items[index] for index in used], [[new_index[index] for index in indices] for indices in schedule]


def _pairs(records: StageRecords) -> StageRecords:
    log_undecided("dpo", records.train)
    return records


def _labels(records: StageRecords) -> StageRecords:
    return replace(records, train=labelled_answers(records.train), held_out=labelled_answers(records.held_out))


def _pair_batches(
    engine: Engine, section: DpoSection, train: Sequence[PairItem], held_out: Sequence[PairItem], *rest: Any
) -> PairBatches:
    pairs, held_out_pairs = (Pairs(items, torch.zeros(len(items), 2)) for items in (train, held_out))  # not read yet
    return PairBatches(engine, section, pairs, held_out_pairs, *rest)


def _label_batches(
    engine: Engine, section: DpoSection, train: Sequence[LabelledItem], held_out: Sequence[LabelledItem], *rest: Any
) -> LabelBatches:
    examples, held_out_examples = (examples_of(items, max_length=section.max_length) for items in (train, held_out))
    return LabelBatches(engine, section, examples, held_out_examples, {}, *rest)


PAIRS = Form(_pairs, partial(encode_preferences, stage="dpo"), _pair_batches)
LABELS = Form(_labels, encode_labelled, _label_batches)
