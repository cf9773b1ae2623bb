"""The rows of a stage and the mean length of its sequences: read from local data, or as recorded in conf/data.

`stage=plan` contacts no hub. The option of a hub data set records the set's size (`data.sources[].size`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pipeline.config.schema import RunConfig, SourceConfig
from pipeline.config.stages import STAGES
from pipeline.data.encode import LabelledItem, PairItem, TokenItem, encoder, labelled_answers
from pipeline.data.load import DataReader
from pipeline.data.records import Preference, Prompt
from pipeline.data.sources import configured_sources, is_remote
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.models.stage_models import make_tokenizer

ASSUMED_ROWS = 50_000
SAMPLE, TRAINED_ON = 256, 2000  # records whose lengths count, and those that a new tokenizer is trained on
CHARACTERS = 4.0  # of a token, without the model's tokenizer
TEMPLATE = 8  # tokens of the chat template


@dataclass(frozen=True)
class DataSize:
    """Training examples of a stage, mean tokens of a prompt and of an answer (None: unknown), and their origin.

    held_out: the held-out examples, or as many as the evaluations use (None: unknown)
    """

    rows: int
    prompt: float | None = None
    answer: float | None = None
    origin: str = ""
    held_out: int | None = None


def size_of(items: Sequence[Any]) -> DataSize:
    """Return the size of encoded examples: conversations, pairs, labelled answers or prompts."""
    sample = [items[index] for index in range(0, len(items), max(1, len(items) // SAMPLE))]
    if isinstance(sample[0], TokenItem):
        lengths = [(len(item.ids), int(item.counts.sum())) for item in sample]
    elif isinstance(sample[0], PairItem):
        lengths = [(n, n - item.prompt) for item in sample for n in (len(item.chosen), len(item.rejected))]
    elif isinstance(sample[0], LabelledItem):
        lengths = [(len(item.ids), len(item.ids) - item.prompt) for item in sample]
    else:
        return DataSize(len(items), fmean(len(item.ids) for item in sample))
    answer = fmean(answer for _, answer in lengths)
    return DataSize(len(items), fmean(total for total, _ in lengths) - answer, answer)


def sampled_size(items: Sequence[Any], sample: int, records: int) -> DataSize:
    """Return the size of a stage with `records` records, of which `sample` were encoded as `items`.

    A record may become several examples (a long document, or earlier answers that the template rewrites) or none.
    """
    return replace(size_of(items), rows=round(records * len(items) / sample))


def later_size(config: RunConfig, stage: str, size: DataSize, later: str) -> DataSize:
    """Return the expected size of a later stage of a run: rows in proportion to `data.stage_shares`, equal lengths."""
    shares: dict[Any, float] = {**config.data.stage_shares}
    own, other = (sum(shares.get(name, 0.0) for name in STAGES[each].shares) for each in (stage, later))
    return replace(size, rows=max(1, round(size.rows * (other / own if own and other else 1.0))))


def data_sizes(config: RunConfig, stages: Sequence[str]) -> dict[str, DataSize]:
    """Return the size of each stage's data. Raises UserError for local data that cannot be read."""
    sizes, tokenizer = dict[str, DataSize](), None
    reader = DataReader(config.data, config.seed, labels=not config.dpo.reads_pairs)
    for stage in stages:
        sources = [s for s in configured_sources(config.data) if STAGES[stage].reads in s.stages]
        if any(map(is_remote, sources)):
            sizes[stage] = _recorded_size(config, stage, sources)
            continue
        read = reader.stage(stage)
        records: Sequence[Any] = read.train
        if stage == "dpo" and not config.dpo.reads_pairs:
            records = labelled_answers(records)
        tokenizer = tokenizer or _local_tokenizer(config, records)
        sample = records[:: max(1, len(records) // SAMPLE)]
        origin = f"counted in {config.data.path or config.data.name}"
        if tokenizer is None:
            size = _size_by_characters(sample, len(records), f"{origin}, {CHARACTERS:g} characters a token")
        else:
            items, _ = encoder(config, stage, tokenizer)(sample)
            size = replace(sampled_size(items, len(sample), len(records)), origin=origin)
        sizes[stage] = replace(size, held_out=len(read.held_out))
    known = next((size.answer for size in sizes.values() if size.answer), None)  # PPO's prompts have no answers
    return {stage: replace(size, answer=size.answer or known) for stage, size in sizes.items()}


def _recorded_size(config: RunConfig, stage: str, sources: Sequence[SourceConfig]) -> DataSize:
    sizes = [source.size for source in sources if source.size is not None]
    if len(sizes) < len(sources):
        return DataSize(ASSUMED_ROWS, origin="assumed: the data is not on this machine, and its size is not recorded")
    rows = sum(size.rows * _share(config, stage, source) for size, source in zip(sizes, sources, strict=True))
    total = sum(size.rows for size in sizes)
    prompt, answer = (
        sum(size.rows * tokens(size) for size in sizes) / total
        for tokens in (lambda size: size.prompt_tokens, lambda size: size.answer_tokens)
    )
    return DataSize(round(rows), prompt, answer, f"recorded in conf/data/{config.data.name}.yaml")


def _share(config: RunConfig, stage: str, source: SourceConfig) -> float:
    """Return the share of a source's rows that a stage trains on."""
    shares = {str(name): share for name, share in config.data.stage_shares.items() if name in source.stages}
    own = sum(shares.get(name, 0.0) for name in STAGES[stage].shares) / (sum(shares.values()) or 1.0)
    return own if source.eval_split else own * (1 - config.data.eval_fraction)


def _local_tokenizer(config: RunConfig, records: Sequence[Any]) -> ChatTokenizer | None:
    """Return the tokenizer of the run; None if only the hub has it."""
    model = config.model
    is_on_hub = model.weights == "pretrained" and model.tokenizer is None and model.path is None
    return None if is_on_hub else make_tokenizer(config, records[:TRAINED_ON])


def _size_by_characters(sample: Sequence[Any], records: int, origin: str) -> DataSize:
    """Return the size of `records` records from the number of characters in a sample of them."""
    lengths = [_lengths(record) for record in sample]
    answers = [answer for _, answer in lengths if answer is not None]
    return DataSize(records, fmean(prompt for prompt, _ in lengths), fmean(answers) if answers else None, origin)


def _lengths(record: Any) -> tuple[float, float | None]:
    """Return the tokens of a record's prompt, and of its answer (the mean of two); None for a prompt without answer."""
    if isinstance(record, Preference):
        prompt, answers = record.prompt, [record.chosen, record.rejected]
    elif isinstance(record, Prompt):
        prompt, answers = record.messages, []
    else:
        prompt, answers = record.messages[:-1], [record.messages[-1]]
    counts = [len(answer.text) / CHARACTERS for answer in answers]
    return sum(len(message.text) for message in prompt) / CHARACTERS + TEMPLATE, fmean(counts) if counts else None
