"""Stage 2: what is loaded, the loop, what is left behind."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.engine import LossFn
from pipeline.config.schema import RunConfig
from pipeline.data.batch import PairBatch, batch_indices
from pipeline.data.encode import encode_preferences
from pipeline.data.pairs import longer
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.launch.manifest import stage_inputs
from pipeline.models.build import EngineChoice, build_scorer
from pipeline.models.checks import verify
from pipeline.models.export import export_scorer
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import (
    adopt_special_ids,
    base_source,
    check_vocabulary,
    require_context,
    run_tokenizer,
    stage_source,
)
from pipeline.planning.choose import announce
from pipeline.stages.data import check_data_to_come, examples, say_undecided, stage_records
from pipeline.stages.settings import arrange, optimizer_config, say_steps, stage_steps
from pipeline.stages.stage_run import StageRun
from pipeline.tracking.watchers import open_watchers
from step2_reward.batches import largest_batch, micro_batches
from step2_reward.evaluate import score_pairs
from step2_reward.loss import bradley_terry_loss, last_scores

REFERENCE_ANSWERS = 512


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate, export. `folder` is RUN/reward."""
    section = config.reward
    source, tokenizer = starting_point(config, folder.parent)
    check_vocabulary(source, tokenizer)
    adopt_special_ids(source, tokenizer)
    require_context(config, "reward", source)
    records = stage_records(config, "reward")
    check_data_to_come(config, "reward")
    say_undecided("reward", records.train)
    encode = partial(encode_preferences, tokenizer, max_length=section.max_length)
    data = examples("reward", section, records, encode)
    train, held_out = data.train, data.held_out
    del records  # texts, of which nothing is needed any more
    steps = stage_steps(section, len(train))
    say_steps("reward", section, steps, len(train))
    arrange(config)
    config, predicted = announce(config, "reward", folder, policy=source)
    section = config.reward
    choice = EngineChoice(config.engine, optimizer_config(section, steps=steps), section.lora)
    engine = build_scorer(source, choice, pad_id=own_pad(tokenizer))
    loss = loss_of(section.centering, use_margin=section.use_margin)
    packing = verify(engine, max_length=section.max_length).packing
    cut: dict[str, Any] = {"budget": section.micro_batch_tokens, "packing": packing, "pad_id": tokenizer.pad_id}
    with (
        open_watchers(config, "reward", folder, steps) as watchers,
        StageRun(
            folder,
            section,
            steps,
            {"reward": engine},
            longest=2 * max(longer(pair) for pair in train),
            watchers=watchers,
            profile=config.profile,
            decides="eval_accuracy",
        ) as stage,
    ):
        stage.predicted = predicted
        stage.restore()
        stage.find_micro_batch_size(
            lambda budget: engine.dry_run(largest_batch(train, **cut | {"budget": budget}), loss)
        )
        for step in stage.steps_left():
            indices = batch_indices(len(train), section.batch_size, config.seed, step - 1)
            cut["budget"] = stage.budget
            batches, _ = micro_batches([train[i] for i in indices], **cut)
            with stage.clock.phase("train"):
                update = engine.update(batches, loss, len(indices))
            stage.clock.tokens += sum(len(train[i].chosen) + len(train[i].rejected) for i in indices)
            stage.require_finite(step, update.loss, [each.input_ids for each in batches])
            means = {name: total / len(indices) for name, total in update.sums.items()}
            figures = {"loss": update.loss, **means, "lr": update.lr, "grad_norm": update.grad_norm}
            figures |= {"skipped_steps": engine.scaler.skipped}
            if stage.evaluates(step) and held_out:
                with stage.clock.phase("evaluate"):
                    found = accuracies(score_pairs(engine, held_out, **cut))
                figures["eval_accuracy"] = float(found["eval_accuracy"])  # type: ignore[arg-type]
                stage.note_best(step, "eval_accuracy", figures["eval_accuracy"], higher=True)
            stage.log(step, figures)
            stage.save(step)
        stage.take_best()
        with stage.clock.phase("evaluate"):
            shares = accuracies(score_pairs(engine, held_out, **cut))
            level = reference_level(score_pairs(engine, train[:REFERENCE_ANSWERS], **cut))
        with stage.clock.phase("export"):
            export_scorer(engine, source, tokenizer, folder / "model", extra=level)
        stage.finish({**shares, **level, "skipped": data.skipped})


def starting_point(config: RunConfig, run_dir: Path) -> tuple[ModelSource, ChatTokenizer]:
    """The weights the reward model starts from, an SFT model's or a base model's, and the policy's tokenizer."""
    sft = stage_inputs(config, run_dir, "reward").get("sft")
    given = Path(config.actor) if config.actor is not None else sft
    tokenizer = run_tokenizer(config, run_dir, given)
    if sft is not None:
        return stage_source(config, sft), tokenizer
    if config.reward_model is None:
        return base_source(config), tokenizer
    source = resolve(config.reward_model, config.seed)
    if source.folder is not None and load_tokenizer(str(source.folder)).fingerprint() != tokenizer.fingerprint():
        raise UserError(
            f"reward_model={source.name} has another tokenizer than the policy, so it would read other text than the "
            "policy writes; choose one of the policy's family, or leave reward_model out"
        )
    return source, tokenizer


def own_pad(tokenizer: ChatTokenizer) -> int | None:
    """The padding id where it is not an end token as well."""
    return None if tokenizer.pad_id in tokenizer.end_ids else tokenizer.pad_id


def loss_of(centering: float, *, use_margin: bool) -> LossFn[PairBatch]:
    """The summed loss of a micro-batch, and how many pairs it ranks right, by what margin."""

    def loss(module: nn.Module, batch: PairBatch) -> tuple[Tensor, dict[str, float | Tensor]]:
        values = module(batch.input_ids, documents=batch.documents)
        scores, count = last_scores(values, batch.ends), len(batch.margins)
        chosen, rejected = scores[:count], scores[count : 2 * count]
        margins = batch.margins if use_margin else torch.zeros_like(batch.margins)
        difference = (chosen - rejected).detach()
        # A batch of no pairs still takes part in the collectives, so its loss must hang on the scores.
        total = bradley_terry_loss(chosen, rejected, margins, centering=centering) + 0.0 * scores.sum()
        return total, {"accuracy": (difference > 0).sum(), "margin": difference.sum()}

    return loss


def reference_level(scored: list[Scored]) -> dict[str, float]:
    """Mean and deviation of good answers' scores; PPO subtracts the mean (Huang et al., 2024, arXiv:2403.17031)."""
    scores = [each.chosen for each in scored]
    return {"reward_mean": statistics.fmean(scores), "reward_std": statistics.pstdev(scores)}
