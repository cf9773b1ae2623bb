"""Stage 2 without a reward model, DPO: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import Engine
from pipeline.config.schema import DpoSection, RunConfig
from pipeline.data.batch import batch_indices
from pipeline.data.encode import PairItem, encode_preferences
from pipeline.data.microbatches import longer_side
from pipeline.evaluation.evaluator import EVALUATION_SEED, Evaluator, compare_models, metrics_of, write_table
from pipeline.evaluation.judge import load_judge
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.stage_models import actor_folder, policy_to_tune, require_context
from pipeline.stages.data import evaluation_prompts, examples, log_undecided, stage_records
from pipeline.stages.start import (
    evaluation_temperatures,
    open_stage,
    optimizer_config,
    plan_stage,
    prepare_generation,
    sampling,
)
from pipeline.stages.supervised import StepBatch, SupervisedTask, train_supervised
from step2_dpo.batches import AnswerBatch, Pairs
from step2_dpo.evaluate import held_out_figures, held_out_shares, pair_logprobs, with_reference
from step2_dpo.objective import loss_of


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export the policy. `folder` is RUN/dpo."""
    source, tokenizer = policy_to_tune(config, actor_folder(config, folder.parent))
    require_context(config, "dpo", source)
    records = stage_records(config, "dpo")
    log_undecided("dpo", records.train)
    encode = partial(encode_preferences, tokenizer, max_length=config.dpo.max_length, stage="dpo")
    data = examples("dpo", config.dpo, records, encode)
    prompts, judge = evaluation_prompts(config, tokenizer), load_judge(config)
    del records  # frees the texts
    plan = plan_stage(config, "dpo", folder, len(data.train), policy=source)
    config, section = plan.config, plan.config.dpo
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = verify(engine, max_length=section.max_length).packing
    schedule = [batch_indices(len(data.train), section.batch_size, config.seed, step) for step in range(plan.steps)]
    train, schedule = select_used(data.train, schedule)
    settings = sampling(config.rollout, tokenizer, seed=EVALUATION_SEED)
    evaluator = Evaluator(prompts, tokenizer, settings, evaluation_temperatures(config), judge)
    longest = 2 * max(longer_side(pair) for pair in train)
    with open_stage(plan, "dpo", folder, {"policy": engine}, best_metric="eval_loss", longest=longest) as stage:
        logprobs = partial(pair_logprobs, engine, packing=packing, pad_id=tokenizer.pad_id)
        sets = {"train": train, "held_out": data.held_out}
        if section.has_reference:
            with stage.clock.phase("reference"):  # the policy is the reference until its first step
                pairs = with_reference(folder, sets, partial(logprobs, budget=stage.budget))
        else:
            pairs = {name: Pairs(items, torch.zeros(len(items), 2)) for name, items in sets.items()}
        batches = DpoBatches(pairs["train"], pairs["held_out"], schedule, packing, tokenizer.pad_id)
        task = SupervisedTask(
            engine,
            loss_of(section),
            batches.step,
            batches.largest_microbatch,
            evaluate=lambda budget: batches.evaluate(engine, section, budget)[0],
            best_metric="eval_loss",
            before_first_step=lambda: write_table(prompts, {"sft": evaluator.evaluate(engine)}, folder),
        )
        train_supervised(stage, task)
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model")
        with stage.clock.phase("evaluate"):
            results = compare_models(prompts, folder, evaluator.evaluate(engine), evaluator.grade)
            _, pair_metrics = batches.evaluate(engine, section, stage.budget)
        by_model = {name: metrics_of(evaluations) for name, evaluations in results.items()}
        summary = {**by_model["dpo"], "held_out": by_model, "skipped": data.skipped, "packing": packing}
        stage.finish({**pair_metrics, **summary})


@dataclass(frozen=True)
class DpoBatches:
    """The training and held-out pairs as batches.

    schedule: for each step, the indices of its pairs in `train`
    packing: a micro-batch is one row without padding
    """

    train: Pairs
    held_out: Pairs
    schedule: Sequence[Sequence[int]]
    packing: bool
    pad_id: int

    def step(self, step: int, budget: int) -> StepBatch[AnswerBatch]:
        """Return the batch of a step, counted from 0. The loss is averaged over its pairs."""
        indices = self.schedule[step]
        batches, _ = self.train.micro_batches(indices, budget=budget, packing=self.packing, pad_id=self.pad_id)
        pairs = [self.train.items[i] for i in indices]
        return StepBatch(batches, len(indices), sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

    def largest_microbatch(self, budget: int) -> AnswerBatch:
        """Return the largest micro-batch that a step can have."""
        return self.train.largest_batch(budget=budget, packing=self.packing, pad_id=self.pad_id)

    def evaluate(self, engine: Engine, section: DpoSection, budget: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of the held-out pairs for a line of metrics.jsonl, and those for summary.json."""
        if not len(self.held_out):
            return {}, {"eval_pairs": 0}
        logprobs: Tensor = pair_logprobs(
            engine, self.held_out.items, budget=budget, packing=self.packing, pad_id=self.pad_id
        )
        metrics = held_out_figures(self.held_out, logprobs, section)
        return metrics, {**metrics, **held_out_shares(self.held_out, logprobs, section)}


def select_used(pairs: Sequence[PairItem], schedule: Sequence[Sequence[int]]) -> tuple[list[PairItem], list[list[int]]]:
    """Return the pairs that occur in `schedule`, and the schedule with their new indices.

    The reference model scores only these pairs.
    """
    used = sorted({index for indices in schedule for index in indices})
    new_index = {index: position for position, index in enumerate(used)}
    return [pairs[index] for index in used], [[new_index[index] for index in indices] for indices in schedule]
