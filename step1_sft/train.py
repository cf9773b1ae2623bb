"""Stage 1: what is loaded, the loop, what is left behind."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engine import Engine
from pipeline.config.schema import RunConfig
from pipeline.data.batch import TokenBatch, batch_indices
from pipeline.data.encode import encode_conversations
from pipeline.distributed import is_rank_zero
from pipeline.evaluation.judge import load_judge
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.checks import verify
from pipeline.models.export import export_policy
from pipeline.models.stage_models import (
    adopt_special_ids,
    base_source,
    check_vocabulary,
    require_adapters,
    require_context,
    require_scorer,
    run_tokenizer,
)
from pipeline.planning.choose import announce
from pipeline.stages.data import check_data_to_come, evaluation_prompts, examples, stage_records
from pipeline.stages.settings import arrange, optimizer_config, prepare_generation, say_steps, stage_steps
from pipeline.stages.stage_run import StageRun
from pipeline.tracking.watchers import open_watchers
from step1_sft.batches import largest_batch, micro_batches
from step1_sft.evaluate import answer, held_out_loss
from step1_sft.loss import sft_loss


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate, export. `folder` is RUN/sft."""
    section = config.sft
    source = base_source(config)
    records = stage_records(config, "sft")
    to_come = check_data_to_come(config, "sft")
    tokenizer = run_tokenizer(config, folder.parent, trained_on=records.train)
    check_vocabulary(source, tokenizer)
    adopt_special_ids(source, tokenizer)
    require_context(config, "sft", source)
    require_scorer(config, source)
    require_adapters(config, source)
    encode = partial(encode_conversations, tokenizer, max_length=section.max_length, loss_on=section.loss_on)
    data = examples("sft", section, records, encode)
    train, held_out = data.train, data.held_out
    prompts, judge = evaluation_prompts(config, tokenizer, to_come), load_judge(config)
    del records, to_come  # texts, of which nothing is needed any more
    steps = stage_steps(section, len(train))
    say_steps("sft", section, steps, len(train))
    arrange(config)
    config, predicted = announce(config, "sft", folder, policy=source)
    section = config.sft
    choice = EngineChoice(config.engine, optimizer_config(section, steps=steps), section.lora, section.dropout)
    engine = build_policy(source, choice, generates=True)
    prepare_generation(engine, config.rollout)
    packing = _packing(engine, section.packing, section.max_length)
    cut: dict[str, Any] = {"budget": section.micro_batch_tokens, "packing": packing, "pad_id": tokenizer.pad_id}
    with (
        open_watchers(config, "sft", folder, steps) as watchers,
        StageRun(
            folder,
            section,
            steps,
            {"policy": engine},
            longest=max(len(item.ids) for item in train),
            watchers=watchers,
            profile=config.profile,
            decides="eval_loss",
        ) as stage,
    ):
        stage.predicted = predicted
        done = stage.restore()
        stage.find_micro_batch_size(
            lambda budget: engine.dry_run(largest_batch(train, **cut | {"budget": budget}), loss_of)
        )
        if done == 0:
            with stage.clock.phase("evaluate"):
                answer("base", config, engine, tokenizer, prompts, folder, judge)
        for step in stage.steps_left():
            indices = batch_indices(len(train), section.batch_size, config.seed, step - 1)
            cut["budget"] = stage.budget
            batches, count = micro_batches([train[i] for i in indices], **cut)
            with stage.clock.phase("train"):
                update = engine.update(batches, loss_of, count)
            stage.clock.tokens += sum(len(train[i].ids) for i in indices)
            stage.require_finite(step, update.loss, [each.input_ids for each in batches])
            figures = {"loss": update.loss, "lr": update.lr, "grad_norm": update.grad_norm}
            figures |= {"skipped_steps": engine.scaler.skipped}
            if stage.evaluates(step) and held_out:
                with stage.clock.phase("evaluate"):
                    figures["eval_loss"] = held_out_loss(engine, held_out, **cut)
                stage.note_best(step, "eval_loss", figures["eval_loss"], higher=False)
            stage.log(step, figures)
            stage.save(step)
        stage.take_best()
        with stage.clock.phase("export"):
            export_policy(engine, source, tokenizer, folder / "model")
        with stage.clock.phase("evaluate"):
            gold = answer("sft", config, engine, tokenizer, prompts, folder, judge)
        stage.finish({"gold_score": gold, "skipped": data.skipped, "packing": packing})


def _packing(engine: Engine, wanted: bool, max_length: int) -> bool:
    """Whether rows are packed: where it is wanted and the model takes it."""
    abilities = verify(engine, max_length=max_length)
    if is_rank_zero():
        for note in abilities.notes:
            print(f"sft: {note}", flush=True)
    return wanted and abilities.packing


def loss_of(module: nn.Module, batch: TokenBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
    """The summed loss of a micro-batch."""
    logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
    return sft_loss(logprobs), {}
