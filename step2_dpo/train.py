"""Stage 2 without a reward model, DPO: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.config.schema import RunConfig
from pipeline.data.batch import batch_indices
from pipeline.data.encode import labelled_answers
from pipeline.evaluation.evaluator import answer_again, compare_models, metrics_of, write_table
from pipeline.evaluation.judge import load_judge
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.stage_models import actor_folder, policy_to_tune, require_context
from pipeline.stages.data import (
    evaluation_prompts,
    examples,
    open_data,
    stage_records,
)
from pipeline.stages.start import build_evaluator, open_stage, optimizer_config, plan_stage, prepare_generation
from pipeline.stages.supervised import train_supervised
from step2_dpo.batches import Batches
from step2_dpo.kto import LabelBatches, examples_of
from step2_dpo.pairs import PairBatches

Item = TypeVar("Item")


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export the policy. `folder` is RUN/dpo."""
    source, tokenizer = policy_to_tune(config, actor_folder(config, folder.parent))
    require_context(config, "dpo", source)
    reader = open_data(config)
    records, reads_pairs = stage_records(config, "dpo", reader), config.dpo.reads_pairs
    prompts = evaluation_prompts(config, tokenizer, reader)
    del reader
    if not reads_pairs:
        records = replace(records, train=labelled_answers(records.train), held_out=labelled_answers(records.held_out))
    data = examples(config, "dpo", records, tokenizer)
    del records  # frees the texts
    evaluator = build_evaluator(config, tokenizer, prompts)
    held_out_rows = max(len(data.held_out), len(prompts))
    plan = plan_stage(config, "dpo", folder, data.train, policy=source, held_out=held_out_rows)
    config, section = plan.config, plan.config.dpo
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = verify(engine, max_length=section.max_length)
    schedule = [batch_indices(len(data.train), section.batch_size, config.seed, step) for step in range(plan.steps)]
    sets: dict[str, Sequence[Any]] = {"held_out": data.held_out}
    sets["train"], schedule = select_used(data.train, schedule)
    if not reads_pairs:
        sets = {name: examples_of(items, max_length=section.max_length) for name, items in sets.items()}
    kind: type[Batches[Any]] = PairBatches if reads_pairs else LabelBatches
    unread = {name: torch.zeros(len(items), 2) for name, items in sets.items()}
    batches = kind(engine, section, sets["train"], sets["held_out"], unread, schedule, packing, tokenizer.pad_id)
    with open_stage(
        plan, "dpo", folder, {"policy": engine}, best_metric=batches.best_metric, longest=batches.longest
    ) as stage:
        if section.has_reference:
            with stage.clock.phase("reference"):  # the policy is the reference until its first step
                batches = batches.read_reference(folder, stage.budget)
        with stage.clock.phase("evaluate"):
            answer_again(evaluator, folder, engine, "sft")
        train_supervised(stage, batches, lambda: write_table(prompts, {"sft": evaluator.evaluate(engine)}, folder))
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model", lora=section.lora)
        with stage.clock.phase("evaluate"):
            results = compare_models(evaluator, folder, evaluator.evaluate(engine), load_judge(config, "pair_judge"))
            _, metrics = batches.evaluation(stage.budget)
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
