"""The data of a stage: records, token ids and evaluation prompts, made by rank 0 for all ranks."""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar, cast

from engine import distributed
from pipeline import progress
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import StageSection
from pipeline.config.stages import POLICIES, STAGES, stages_to_run
from pipeline.data.encode import ADDED, encoder, labelled_answers
from pipeline.data.formats import Record
from pipeline.data.load import OVERWEIGHT, RESERVED, DataReader, StageRecords, is_generated
from pipeline.data.records import Preference, Prompt
from pipeline.data.sources import first_turn
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.planning.data_size import DataSize, sampled_size
from pipeline.planning.stage_task import stage_steps

Result = TypeVar("Result")
SENT = 2048  # examples in a broadcast
SAMPLE = 256  # records of a later stage that the first stage encodes
TRIED = 3  # of these, the data rows for which it calls ppo.reward_function
_SHARE_ROW, _SHARES = "  {:<9}{:>9}{:>8}  {}", ("stage", "rows", "share", "keys")


@dataclass(frozen=True)
class DataToCome:
    """The number of training records of a later stage, and a sample of them."""

    rows: int
    sample: Sequence[Any]


@dataclass(frozen=True)
class Examples:
    """Token ids of the training and the held-out examples, and the numbers of skipped and cut records by reason."""

    train: Sequence[Any]
    held_out: Sequence[Any]
    skipped: dict[str, int]


def on_rank_zero(make: Callable[[], Result]) -> Result:
    """Call `make` on rank 0 and return its result on every rank, so that data is read and tokenized once.

    The other ranks wait up to a day. If `make` raises UserError on rank 0, every rank raises it.
    """
    outcome: tuple[Result | None, str | None] = None, None
    if distributed.is_rank_zero():
        try:
            with progress.own().allow(progress.ALONE):
                outcome = make(), None
        except UserError as mistake:
            outcome = None, str(mistake)
    result, problem = distributed.broadcast_object(outcome)
    if problem is not None:
        raise UserError(problem)
    return cast(Result, result)


def open_data(config: RunConfig) -> DataReader:
    """Return the reader of the data of a run. It holds what it read, so delete it before training."""
    judges = config.evaluation.judge, config.evaluation.pair_judge
    keeps_rows = any(function is not None for function in (config.ppo.reward_function, *judges))
    return DataReader(config.data, config.seed, labels=not config.dpo.reads_pairs, keeps_rows=keeps_rows)


def stage_records(config: RunConfig, stage: str, reader: DataReader) -> StageRecords:
    """Return the records of a stage on rank 0; on the other ranks, return only the numbers of skipped rows.

    Rank 0 prints the numbers of skipped and repeated rows, and of pairs that their scores do not decide.
    """
    loaded: list[StageRecords] = []

    def load() -> dict[str, int]:
        generated = is_generated(config.data, stage)
        if not generated:
            print(f"{stage}: reading the data", flush=True)
        records = _load(config, stage, reader)
        loaded.append(records)
        unusable = {reason: count for reason, count in records.skipped.items() if reason != RESERVED}
        if unusable:
            print(f"{stage}: skipped rows: {_counted(unusable)}", flush=True)
        repeats = 0 if generated else len(records.train) - len(set(records.train))
        if repeats:
            print(f"{stage}: {repeats} of {len(records.train)} rows are repeated, and each copy counts", flush=True)
        log_undecided(stage, records.train)
        return records.skipped

    skipped = on_rank_zero(load)
    return loaded[0] if loaded else StageRecords([], [], skipped)


def examples(config: RunConfig, stage: str, records: StageRecords, tokenizer: ChatTokenizer) -> Examples:
    """Encode the records of SFT, the reward model or DPO, and print how many were cut or dropped.

    Raises UserError if no training example is left, or if `export=best` has no held-out example.
    """
    section: StageSection = getattr(config, stage)
    encode = encoder(config, stage, tokenizer)
    train, notes = encode_for_all(encode, records.train)
    log_cut(stage, notes, len(records.train), f"{stage}.max_length")
    log_divided(stage, tokenizer)
    evaluation_records = records.held_out[: section.eval_examples]
    parts, _ = encode_for_all(encode, evaluation_records)  # a long document has many
    count = min(len(parts), section.eval_examples)
    held_out = [parts[index * len(parts) // count] for index in range(count)]
    if section.export == "best" and not held_out:
        raise UserError(
            f"{stage}.export=best needs held-out examples, and there are none: set data.eval_fraction or eval_path of "
            f"a source, or use {stage}.export=last"
        )
    return Examples(train, held_out, {**records.skipped, **notes})


def return_memory_of_texts() -> None:
    """Return the memory of deleted records to the system, which may be gigabytes. Does nothing without glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def encode_for_all(
    encode: Callable[[Sequence[Any]], tuple[list[Any], Counter[str]]], records: Sequence[Any]
) -> tuple[list[Any], Counter[str]]:
    """Return the examples and the notes that `encode` makes of the records of rank 0, on every rank.

    Rank 0 sends some examples at a time, because a broadcast copies its message several times.
    """
    made: list[Any] = []

    def make() -> tuple[int, Counter[str]]:
        items, notes = encode(records)
        made.extend(items)
        return len(items), notes

    count, notes = on_rank_zero(make)
    parts = (distributed.broadcast_object(made[start : start + SENT]) for start in range(0, count, SENT))
    return [item for part in parts for item in part], notes


def log_divided(stage: str, tokenizer: ChatTokenizer) -> None:
    """Print a warning if answers that were encoded had the names of control tokens."""
    if distributed.is_rank_zero() and tokenizer.divided:
        names = ", ".join(f"{name} in {count:,}" for name, count in tokenizer.divided.most_common())
        print(
            f"warning: {stage}: answers have names of control tokens, which are read as plain text ({names}). Remove "
            "them from the data; or, if they mark reasoning, set model.chat_template=FILE to a template that does not "
            "write them",
            file=sys.stderr,
            flush=True,
        )


def log_undecided(stage: str, records: Sequence[Record]) -> None:
    """Print for how many pairs the scores in the data do not prefer the chosen answer."""
    pairs = [record for record in records if isinstance(record, Preference)]
    scored = {pair.source for pair in pairs if pair.margin}
    ties = sum(not pair.margin for pair in pairs if pair.source in scored)
    flipped = sum(pair.margin < 0 for pair in pairs)
    if ties or flipped:
        print(
            f"{stage}: by the scores in the data, {ties} of {len(pairs)} pairs are ties, and in {flipped} the rejected "
            "answer is better; training uses all pairs as labelled",
            flush=True,
        )


def check_data_to_come(
    config: RunConfig, stage: str, records: StageRecords, reader: DataReader
) -> dict[str, DataToCome]:
    """Check the data of later stages in the first stage of a run, so that errors appear at once.

    `records` are those of the first stage. Prints how the stages divide the rows that serve several of them. Returns
    the data of the later stages on rank 0, for `check_lengths_to_come`.
    """
    first, *later = stages_to_run(config)
    to_read = [each for each in later if not is_generated(config.data, each)]
    to_come: dict[str, DataToCome] = {}
    if stage != first or not to_read:
        return to_come

    def check() -> None:
        print(f"{stage}: checking the data of {' and '.join(to_read)}", flush=True)
        loaded = {stage: records}
        for index, each in enumerate(to_read):
            loaded[each], to_come[each] = _load_counts(config, each, reader)
            reader.keep_only([*to_read[index + 1 :], "ppo"])
        if any(RESERVED in each.skipped for each in loaded.values()):
            print("\n".join(share_table(config, loaded)), flush=True)
        for each in to_read:
            stage_steps(getattr(config, each), len(loaded[each].train))  # the stage may drop long prompts
        if "ppo" in to_come and config.ppo.reward_function is not None:
            _try_reward(stage, config.ppo.reward_function, to_come["ppo"].sample[:TRIED])

    on_rank_zero(check)
    return to_come


def _try_reward(stage: str, where: str, prompts: Sequence[Prompt]) -> None:
    from pipeline.evaluation.user_function import try_reward

    print(f"{stage}: calling ppo.reward_function={where} for {len(prompts)} rows", flush=True)
    try:
        try_reward(where, [prompt.row for prompt in prompts if prompt.row is not None])
    except UserError as problem:
        raise UserError(f"stage ppo, checked in advance: {problem}") from problem


def check_lengths_to_come(
    config: RunConfig, to_come: Mapping[str, DataToCome], tokenizer: ChatTokenizer
) -> dict[str, DataSize]:
    """Return the size of the data of each later stage, on every rank.

    Raises UserError if a later stage could use none of its sampled records, usually because all are too long.
    """

    def check() -> dict[str, DataSize]:
        sizes = {}
        for stage, data in to_come.items():
            is_labelled = stage == "dpo" and not config.dpo.reads_pairs
            sample = labelled_answers(data.sample) if is_labelled else data.sample
            try:
                items, _ = encoder(config, stage, tokenizer)(sample)
            except UserError as problem:
                raise UserError(f"stage {stage}, on a sample of its data: {problem}") from problem
            sizes[stage] = sampled_size(items, len(data.sample), data.rows)
        tokenizer.divided.clear()  # each stage reports its own answers
        return sizes

    return on_rank_zero(check)


def share_table(config: RunConfig, loaded: Mapping[str, StageRecords]) -> list[str]:
    """Return the lines of a table: the rows of each stage, and the keys that set its share."""
    shares = config.data.stage_shares
    lines = ["data: several stages read the same file; each prompt belongs to one of them", _SHARE_ROW.format(*_SHARES)]
    for stage, records in loaded.items():
        own = {f"data.stage_shares.{name}": shares[name] for name in STAGES[stage].shares if name in shares}
        rows, reserved = len(records.train), records.skipped.get(RESERVED, 0)
        keys = " ".join(f"{key}={share:g}" for key, share in own.items()) if reserved else "no other stage reads them"
        owned = rows + records.skipped.get(OVERWEIGHT, 0)
        share = f"{owned / max(1, owned + reserved):.0%}"
        lines.append(_SHARE_ROW.format(stage, f"{rows:,}", share, keys).rstrip())
    held_out, sources = max(len(records.held_out) for records in loaded.values()), config.data.sources
    have_own = bool(sources) and all(source.eval_path or source.eval_split for source in sources)
    key = "eval_path or eval_split" if have_own else f"data.eval_fraction={config.data.eval_fraction:g}"
    return [*lines, _SHARE_ROW.format("held out", f"{held_out:,}", "", key)]


def evaluation_prompts(config: RunConfig, tokenizer: ChatTokenizer, reader: DataReader) -> list[Prompt]:
    """Return the evaluation prompts on every rank.

    The base, SFT and PPO (or DPO) models all answer them. Raises UserError if no prompt fits and the run has PPO or
    DPO.
    """
    return on_rank_zero(lambda: choose_prompts(config, tokenizer, reader.held_out()))


def choose_prompts(config: RunConfig, tokenizer: ChatTokenizer, held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the evaluation prompts among the held-out prompts."""
    limit = config.rollout.max_prompt_tokens
    fitting: Iterator[Prompt] = (p for p in held_out if len(tokenizer.encode_prompt(p.messages)) <= limit)
    if not is_generated(config.data, "ppo"):  # generated conversations share a first turn by chance only
        fitting = one_of_each_conversation(fitting)
    chosen = list(islice(fitting, config.evaluation.prompts))
    if not held_out and not set(POLICIES) & set(stages_to_run(config)):
        print("no held-out prompts: no prompt is answered", flush=True)
    elif not chosen:
        problem = f"none of the {len(held_out)} held-out prompts fits into rollout.max_prompt_tokens={limit}"
        judged = [stage.upper() for stage in stages_to_run(config) if stage in POLICIES]
        if judged:
            raise UserError(
                f"{problem}, so {judged[0]} could not be evaluated: raise it, or hold out other prompts with "
                "data.eval_fraction or eval_path of a source"
            )
        print(f"{problem}: no prompt is answered", flush=True)
    return chosen


def one_of_each_conversation(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Yield the first prompt of each conversation.

    A prompt belongs to the conversation of an earlier prompt if both have the same first turn, and one of them has more
    turns. The intervals over prompts require independent answers, and answers within a conversation are not.
    """
    has_more_turns: dict[bytes, bool] = {}
    for prompt in prompts:
        turn, more = first_turn(prompt), sum(message.role == "user" for message in prompt.messages) > 1
        if turn not in has_more_turns or not (more or has_more_turns[turn]):
            has_more_turns[turn] = more
            yield prompt


def log_cut(stage: str, notes: Mapping[str, int], count: int, limit: str) -> None:
    """Print how many of `count` examples were cut or dropped because of their length, and how many were added.

    `limit` is the limit's key.
    """
    if not distributed.is_rank_zero():
        return
    if cut := {reason: number for reason, number in notes.items() if reason != ADDED}:
        print(f"{stage}: too long: {_counted(cut)} of {count}; {limit} sets the limit", flush=True)
    if added := notes.get(ADDED):
        print(f"{stage}: {added:,} more examples: earlier answers that the template rewrites", flush=True)


def _load(config: RunConfig, stage: str, reader: DataReader) -> StageRecords:
    records = reader.stage(stage)
    if stage == "reward" and config.reward.use_margin and not any(pair.margin for pair in records.train):
        raise UserError(
            "reward.use_margin=true has no effect, because no pair has a margin: add a column margin, or score_chosen "
            "and score_rejected (columns of a source renames columns), or remove reward.use_margin"
        )
    return records


def _load_counts(config: RunConfig, stage: str, reader: DataReader) -> tuple[StageRecords, DataToCome]:
    """Return the records of a stage with numbers instead of the training records, and a sample of these."""
    records = _load(config, stage, reader)
    count = len(records.train)
    return replace(records, train=range(count)), DataToCome(count, records.train[:: max(1, count // SAMPLE)])


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} ({reason})" for reason, count in sorted(reasons.items()))
