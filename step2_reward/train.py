"""Stage 2, the reward model: set-up, training and export. The loop is `pipeline/stages/supervised.py`."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import padded_length
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.models.build import EngineChoice, build_scorer
from pipeline.models.checks import verify
from pipeline.models.export import export_scorer
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import (
    actor_folder,
    actor_tokenizer,
    adopt_special_ids,
    check_vocabulary,
    check_vocabulary_of,
    require_context,
    run_tokenizer,
)
from pipeline.stages.data import (
    check_data_to_come,
    check_lengths_to_come,
    examples,
    open_data,
    stage_records,
)
from pipeline.stages.start import open_stage, optimizer_config, plan_stage
from pipeline.stages.supervised import train_supervised
from step2_reward.batches import RewardBatches
from step2_reward.report_card import write_card

REFERENCE_ANSWERS = 512


def run(config: RunConfig, folder: Path) -> None:
    """Train, evaluate and export. `folder` is RUN/reward."""
    source, tokenizer = starting_point(config, folder.parent)
    check_vocabulary(source, tokenizer)
    adopt_special_ids(source, tokenizer)
    require_context(config, "reward", source)
    reader = open_data(config)
    records = stage_records(config, "reward", reader)
    later = check_lengths_to_come(config, check_data_to_come(config, "reward", records, reader), tokenizer)
    del reader  # frees the records of later stages
    data = examples(config, "reward", records, tokenizer)
    del records  # frees the texts
    plan = plan_stage(
        config, "reward", folder, data.train, policy=source, later=later or None, held_out=len(data.held_out)
    )
    config, section = plan.config, plan.config.reward
    choice = EngineChoice(config.engine, optimizer_config(section, steps=plan.steps), section.lora)
    engine = build_scorer(source, choice, pad_id=tokenizer.model_pad_id)
    packing = verify(engine, max_length=section.max_length)
    batches = RewardBatches(engine, section, data.train, data.held_out, config.seed, packing, tokenizer.pad_id)
    longest = max(map(padded_length, data.train))
    with open_stage(
        plan, "reward", folder, {"reward": engine}, best_metric=batches.best_metric, longest=longest
    ) as stage:
        train_supervised(stage, batches)
        with stage.clock.phase("evaluate"):
            held_out = batches.scores(data.held_out, stage.budget)
            level = reference_level(batches.scores(reference_pairs(data.train), stage.budget))
            write_card(
                folder,
                held_out,
                lambda pairs: batches.scores(pairs, stage.budget),
                tokenizer,
                reference=level,
                penalty=config.ppo.missing_end_penalty,
                max_length=section.max_length,
            )
        with stage.clock.phase("export"):
            export_scorer(engine, source, tokenizer, folder / "model", extra=level)
        stage.finish({**accuracies(held_out), **level, "skipped": data.skipped})


def starting_point(config: RunConfig, run_dir: Path) -> tuple[ModelSource, ChatTokenizer]:
    """Return the model that the reward model starts from (SFT or base), and the tokenizer of the policy."""
    assert config.reward.init != "auto", "the launcher writes the model that `auto` selects into config.yaml"
    starts_from_sft, sft = config.reward.init == "sft", actor_folder(config, run_dir)
    if starts_from_sft or config.actor is not None:
        tokenizer = actor_tokenizer(config, sft)
    else:
        tokenizer = run_tokenizer(config, run_dir)
    if starts_from_sft:
        return resolve(config.model, config.seed, folder=sft), tokenizer
    if config.reward_model is None:
        return resolve(config.model, config.seed), tokenizer
    source = resolve(config.reward_model, config.seed)
    check_vocabulary_of("reward_model", source, tokenizer)
    return source, tokenizer


def reference_pairs(pairs: Sequence[PairItem]) -> Sequence[PairItem]:
    """Return at most `REFERENCE_ANSWERS` pairs at equal distances: the pairs of one source follow those of another."""
    return pairs[:: -(-len(pairs) // REFERENCE_ANSWERS)]


def reference_level(scored: list[Scored]) -> dict[str, float]:
    """Return mean and standard deviation of the scores of chosen answers.

    PPO subtracts the mean (Huang et al., 2024, arXiv:2403.17031).
    """
    scores = [each.chosen for each in scored]
    return {"reward_mean": statistics.fmean(scores), "reward_std": statistics.pstdev(scores)}
