"""Stage 2 without a reward model, DPO: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.config.schema import RunConfig
from pipeline.data.batch import batch_indices
from pipeline.data.load import StageRecords
from pipeline.data.records import labelled_answers
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluator, compare_models, metrics_of, write_table
from pipeline.evaluation.judge import load_judge
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.stage_models import actor_folder, policy_to_tune, require_context
from pipeline.stages.data import evaluation_prompts, examples, log_divided, log_undecided, stage_records
from pipeline.stages.start import (
    open_stage,
    optimizer_config,
    plan_stage,
    prepare_generation,
    sampling,
)
from pipeline.stages.supervised import SupervisedTask, train_supervised
from step2_dpo.batches import Batches
from step2_dpo.kto import LabelBatches, examples_of
from step2_dpo.pairs import PairBatches

Item = TypeVar("Item")


@dataclass(frozen=True)
class Form:
    """What the stage learns from, pairs or labelled answers.

    select: prepares the records; examples: pairs each answer with another one; batches: their batches
    """

    select: Callable[[StageRecords], StageRecords]
    examples: Callable[..., Sequence[Any]]
    batches: type[PairBatches] | type[LabelBatches]


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export the policy. `folder` is RUN/dpo."""
    source, tokenizer = policy_to_tune(config, actor_folder(config, folder.parent))
    require_context(config, "dpo", source)
    form = PAIRS if config.dpo.reads_pairs else LABELS
    records = form.select(stage_records(config, "dpo"))
    data = examples(config, "dpo", records, tokenizer)
    log_divided("dpo", tokenizer)
    prompts, judge = evaluation_prompts(config, tokenizer), load_judge(config)
    del records  # frees the texts
    plan = plan_stage(config, "dpo", folder, data.train, policy=source)
    config, section = plan.config, plan.config.dpo
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = verify(engine, max_length=section.max_length).packing
    schedule = [batch_indices(len(data.train), section.batch_size, config.seed, step) for step in range(plan.steps)]
    used, schedule = select_used(data.train, schedule)
    train, held_out = (form.examples(items, max_length=section.max_length) for items in (used, data.held_out))
    unread = {"train": torch.zeros(len(train), 2), "held_out": torch.zeros(len(held_out), 2)}
    batches: Batches[Any] = form.batches(engine, section, train, held_out, unread, schedule, packing, tokenizer.pad_id)
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
                prompts, folder, evaluator.evaluate(engine), evaluator.grade, load_judge(config, "pair_judge")
            )
            _, metrics = batches.evaluate(stage.budget)
        by_model = {name: metrics_of(evaluations) for name, evaluations in results.items()}
        summary = {**by_model["dpo"], "held_out": by_model, "skipped": data.skipped, "packing": packing}
        stage.finish({**metrics, **summary})


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


PAIRS = Form(_pairs, lambda items, max_length: items, PairBatches)
LABELS = Form(_labels, examples_of, LabelBatches)
