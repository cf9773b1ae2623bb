"""The facts that `zerochat doctor` shows: the data, the tokenizer and the models of each stage, without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.schema import ModelConfig, RunConfig
from pipeline.config.stages import POLICIES, stages_to_run
from pipeline.data.encode import LabelledItem, PairItem, TokenItem, encoder, labelled_answers
from pipeline.data.load import DataReader, StageRecords
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.models.source import ModelSource, resolve
from pipeline.models.stage_models import (
    adopt_special_ids,
    check_vocabulary,
    make_tokenizer,
    policy_to_tune,
    require_context,
    require_later_models,
)
from pipeline.planning.data_size import DataSize, sampled_size
from pipeline.planning.stage_task import stage_steps

SAMPLE = 2000  # records of a stage that are tokenized


@dataclass(frozen=True)
class StageFacts:
    """A stage: its steps, and its rows.

    sample: the records that were tokenized; skipped: numbers of skipped rows by reason; cut: numbers of `sample` by
    reason; size: rows and mean lengths; example: the tokens of the first record, and which of them the loss includes
    """

    stage: str
    steps: int
    train: int
    held_out: int
    sample: int
    skipped: Mapping[str, int]
    cut: Mapping[str, int]
    size: DataSize
    example: tuple[Sequence[int], Sequence[bool]]


@dataclass(frozen=True)
class Facts:
    """A run: the models without weights, the tokenizer, and the stages."""

    policy: ModelSource
    reward: ModelSource | None
    tokenizer: ChatTokenizer
    stages: Sequence[StageFacts]


def gather(config: RunConfig) -> Facts:
    """Check the models of a run as the first stage would, and read its tokenizer and its data.

    Only one stage's records are in memory at a time, beside the parsed rows, which the stages share. Raises the
    UserError that the run would end with.
    """
    stages = stages_to_run(config)
    reader = DataReader(config.data, config.seed, labels=not config.dpo.reads_pairs)
    reward = _source(config.reward_model, config.seed) if config.reward_model is not None else None
    if stages[0] in POLICIES and config.actor is not None:
        policy, tokenizer = policy_to_tune(config, Path(config.actor))
    else:
        policy = _source(config.model, config.seed)
        reads_first = config.model.trains_tokenizer and stages[0] == "sft"
        tokenizer = make_tokenizer(config, reader.stage("sft").train if reads_first else ())
        check_vocabulary(policy, tokenizer)
        adopt_special_ids(policy, tokenizer)
    for stage in stages:
        require_context(config, stage, reward or policy if stage == "reward" else policy)
    require_later_models(config, policy, tokenizer)
    facts = [_stage_facts(config, stage, reader.stage(stage), tokenizer) for stage in stages]
    return Facts(policy, reward, tokenizer, facts)


def _source(model: ModelConfig, seed: int) -> ModelSource:
    """Return the source of a model, without its weights if they are on a hub."""
    return resolve(model, seed, weights=model.path is not None)


def _stage_facts(config: RunConfig, stage: str, records: StageRecords, tokenizer: ChatTokenizer) -> StageFacts:
    train = records.train
    if stage == "dpo" and not config.dpo.reads_pairs:
        train = labelled_answers(train)
    sample = train[:SAMPLE]
    items, cut = encoder(config, stage, tokenizer)(sample)
    size = replace(sampled_size(items, len(sample), len(train)), held_out=len(records.held_out))
    steps = stage_steps(getattr(config, stage), size.rows)
    counts = len(train), len(records.held_out), len(sample)
    return StageFacts(stage, steps, *counts, records.skipped, cut, size, _example(items[0]))


def _example(item: Any) -> tuple[Sequence[int], Sequence[bool]]:
    """Return the tokens of an encoded record, and which of them the loss includes: none of a prompt without answer."""
    if isinstance(item, TokenItem):
        return item.ids.tolist(), item.counts.tolist()
    if isinstance(item, PairItem):
        ids, prompt = item.chosen.tolist(), item.prompt
    elif isinstance(item, LabelledItem):
        ids, prompt = item.ids.tolist(), item.prompt
    else:
        ids, prompt = item.ids, len(item.ids)
    return ids, [index >= prompt for index in range(len(ids))]
