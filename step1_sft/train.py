"""Stage 1, supervised fine-tuning: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from engine import Engine, distributed
from pipeline.config.schema import RunConfig
from pipeline.data.batch import TokenBatch, batch_indices, token_batch
from pipeline.data.encode import TokenItem
from pipeline.data.formats import Record
from pipeline.data.microbatches import largest_microbatch, token_microbatches
from pipeline.data.rendering import example_lines, token_line
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.evaluator import Evaluator, answer_again, metrics_of, write_table
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import (
    adopt_special_ids,
    check_vocabulary,
    require_context,
    require_later_models,
    run_tokenizer,
)
from pipeline.stages.data import (
    check_data_to_come,
    check_lengths_to_come,
    evaluation_prompts,
    examples,
    open_data,
    stage_records,
)
from pipeline.stages.start import build_evaluator, open_stage, optimizer_config, plan_stage, prepare_generation
from pipeline.stages.supervised import StepBatch, SupervisedTask, train_supervised
from step1_sft.loss import sft_loss


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export. `folder` is RUN/sft."""
    source = resolve(config.model, config.seed)
    require_context(config, "sft", source)
    checked_tokenizer = partial(_checked_tokenizer, config, source, folder.parent)
    tokenizer = None if config.model.trains_tokenizer else checked_tokenizer()  # errors appear before data is read
    reader = open_data(config)
    records = stage_records(config, "sft", reader)
    to_come = check_data_to_come(config, "sft", records, reader)
    tokenizer = tokenizer or checked_tokenizer(trained_on=records.train)
    prompts = evaluation_prompts(config, tokenizer, reader)
    del reader  # frees the records of later stages
    later = check_lengths_to_come(config, to_come, tokenizer)
    data = examples(config, "sft", records, tokenizer)
    if distributed.is_rank_zero():
        first = data.train[0]
        shown = example_lines(tokenizer, first.ids.tolist(), first.counts.tolist())
        print(f"sft: {token_line(tokenizer)}", *shown, sep="\n", flush=True)
    evaluator = build_evaluator(config, tokenizer, prompts)
    del records, to_come  # frees the texts
    held_out_rows = max(len(data.held_out), len(evaluator.prompts))
    plan = plan_stage(config, "sft", folder, data.train, policy=source, later=later, held_out=held_out_rows)
    config, section = plan.config, plan.config.sft
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora, section.dropout)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = verify(engine, max_length=section.max_length) and section.packing
    batches = SftBatches(engine, data.train, data.held_out, section.batch_size, config.seed, packing, tokenizer.pad_id)
    longest = max(len(item.ids) for item in data.train)
    with open_stage(plan, "sft", folder, {"policy": engine}, best_metric=batches.best_metric, longest=longest) as stage:
        with stage.clock.phase("evaluate"):
            answer_again(evaluator, folder, engine, "base")
        train_supervised(stage, batches, lambda: record_answers("base", engine, evaluator, folder))
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model", lora=section.lora)
        with stage.clock.phase("evaluate"):
            metrics = record_answers("sft", engine, evaluator, folder)
        stage.finish({**metrics, "skipped": data.skipped, "packing": packing})


def _checked_tokenizer(
    config: RunConfig, source: ModelSource, run_dir: Path, trained_on: Sequence[Record] = ()
) -> ChatTokenizer:
    """Return the tokenizer of the run. Raises UserError if a model of the run cannot be used with this tokenizer."""
    tokenizer = run_tokenizer(config, run_dir, trained_on=trained_on)
    check_vocabulary(source, tokenizer)
    adopt_special_ids(source, tokenizer)
    require_later_models(config, source, tokenizer)
    return tokenizer


@dataclass(frozen=True)
class SftBatches(SupervisedTask[TokenBatch]):
    """The conversations of SFT as batches. `packing`: a micro-batch is one row without padding."""

    items: Sequence[TokenItem]
    held_out: Sequence[TokenItem]
    batch_size: int
    seed: int
    packing: bool
    pad_id: int

    def step(self, step: int, budget: int) -> StepBatch[TokenBatch]:
        items = [self.items[i] for i in batch_indices(len(self.items), self.batch_size, self.seed, step)]
        batches, count = token_microbatches(items, budget=budget, packing=self.packing, pad_id=self.pad_id)
        return StepBatch(batches, count, sum(len(item.ids) for item in items))

    def largest_microbatch(self, budget: int) -> TokenBatch:
        lengths = [len(item.ids) for item in self.items]
        collate = partial(token_batch, pad_id=self.pad_id, packing=self.packing)
        return largest_microbatch(self.items, lengths, collate, budget=budget, packing=self.packing)

    def loss(self, module: nn.Module, batch: TokenBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        return loss_of(module, batch)

    def evaluate(self, budget: int) -> dict[str, float]:
        """Return the mean loss of held-out conversations, in nats per token; nothing if none are held out."""
        if not self.held_out:
            return {}
        batches, count = token_microbatches(self.held_out, budget=budget, packing=self.packing, pad_id=self.pad_id)

        def loss(module: nn.Module, batch: TokenBatch) -> list[Tensor]:
            logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
            return [-logprobs.double().sum()]

        total = sum((part.item() for losses in self.engine.score(batches, loss) for part in losses), 0.0)
        return {"eval_loss": distributed.sum_over_ranks(total) / count}


def loss_of(module: nn.Module, batch: TokenBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Return the summed loss of a micro-batch, without metrics."""
    logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
    return sft_loss(logprobs), {}


def record_answers(name: str, engine: Engine, evaluator: Evaluator, folder: Path) -> dict[str, float]:
    """Answer the held-out prompts, add the answers to samples.jsonl under `name`, and return the metrics."""
    evaluations = evaluator.evaluate(engine)
    write_table(evaluator.prompts, {name: evaluations}, folder, extend=True)
    return metrics_of(evaluations)
