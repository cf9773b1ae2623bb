"""Sources of rows: local files, data sets of the Hugging Face hub, and generated data (the demo, reasoning-gym).

A source reads each of its tables and parses each row once. Every stage converts the parsed records to its own type.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.data.files import Table, data_files, read_table, table_of
from pipeline.data.formats import detect, for_stage, parse_row
from pipeline.data.records import BadRow, Message, Prompt, Record, Row, UnusedRow, prompt_of
from pipeline.errors import UserError
from pipeline.installation import pip_install

if TYPE_CHECKING:
    from pipeline.config.schema import DataConfig, SourceConfig, TaskConfig

_DEMO_ROWS = {"sft": "conversations", "reward": "preferences", "ppo": "prompts"}


@dataclass
class RecordTable:
    """The records of a table. The rows are parsed once, into records of the table's form.

    source: the name of the source
    keeps_rows: prompts store their rows; otherwise the rows are dropped when they are parsed
    """

    table: Table
    source: str
    keeps_rows: bool = False

    def __post_init__(self) -> None:
        self.name = self.table.name
        self.form = detect(self.table.columns, self.name)

    def for_stage(
        self, stage: str, bad_row_limit: float, *, labels: bool = False
    ) -> tuple[list[tuple[Record, bytes]], Counter[str]]:
        """Return the records of a stage with the digests of their first turns, and the skipped rows by reason.

        labels: dpo also reads labelled answers, and sft leaves out the undesirable ones
        Unusable rows are skipped and counted. Raises UserError if their share is above `bad_row_limit`. The message
        lists the number of rows and the first row for each reason.
        """
        usable, unusable, others = self._parsed
        records, bad, unused = [], [*unusable], Counter(others)
        for index, record, turn in usable:
            try:
                own = for_stage(record, stage, labels=labels)
            except UnusedRow as reason:
                unused[str(reason)] += 1
            except BadRow as reason:
                bad.append((self.table.position(index), str(reason)))
            else:
                if self.keeps_rows and isinstance(own, Prompt):
                    own = replace(own, row=self.table.rows[index])
                records.append((own, turn))
        count = len(usable) + len(unusable) + others.total()
        if len(bad) > bad_row_limit * count:
            raise UserError(_refusal(self.name, stage, bad, count, bad_row_limit))
        return records, Counter(reason for _, reason in bad) + unused

    def turns(self) -> set[bytes]:
        """Return the digests of the first turns of all usable rows."""
        return {turn for *_, turn in self._parsed[0]}

    @cached_property
    def _parsed(self) -> tuple[list[tuple[int, Record, bytes]], list[tuple[str, str]], Counter[str]]:
        """The index, the record and the digest of the first turn of each usable row, and the other rows.

        These are (position, reason) of each unusable row, and the numbers of rows by reason that no stage reads.
        """
        table, records, bad = self.table, [], list[tuple[str, str]]()
        unused: Counter[str] = Counter()
        for index, row in enumerate(table.rows):
            named = {name: value for name, value in row.items() if name in table.columns}  # no old name of a column
            try:
                record = parse_row(named, self.form, self.source)
                records.append((index, record, first_turn(record)))
            except UnusedRow as reason:
                unused[str(reason)] += 1
            except BadRow as reason:
                bad.append((table.position(index), str(reason)))
        if not self.keeps_rows:
            self.table = replace(table, rows=())
        return records, [*bad, *table.broken], unused


@dataclass(frozen=True)
class Source:
    """A source of rows.

    train, held_out: read the tables of a stage; without `held_out`, a share of the training rows is held out
    dedicated: whether the source has separate rows for each stage, so that stages do not divide rows
    keeps_rows: whether the tables keep their rows after parsing
    """

    name: str
    config: "SourceConfig"
    train: Callable[[str], list[Table]]
    held_out: Callable[[str], list[Table]] | None
    dedicated: bool = False
    keeps_rows: bool = False
    _read: dict[tuple[bool, str], list[RecordTable]] = field(default_factory=dict, init=False)

    def tables(self, stage: str, *, held_out: bool = False) -> list[RecordTable]:
        """Return the training or the held-out tables of a stage, which are read at the first call."""
        key = held_out, stage if self.dedicated else ""
        if key not in self._read:
            read = self.held_out if held_out else self.train
            assert read is not None
            self._read[key] = [RecordTable(table, self.name, self.keeps_rows) for table in read(stage)]
        return self._read[key]


def configured_sources(data: "DataConfig") -> list["SourceConfig"]:
    """Return the sources of a data configuration. `data.path` replaces the list."""
    from pipeline.config.schema import SourceConfig

    return list(data.sources) if data.path is None else [SourceConfig(path=data.path)]


def open_source(config: "SourceConfig", data: "DataConfig", *, seed: int, key: str = "data.path") -> Source:
    """Return the source for a configuration. Error messages call its path `key`. `seed` generates rows.

    If both `path` and `hub` are set, `path` is read if it exists, otherwise the hub.
    """
    if config.builtin == "tasks":
        return _open_tasks(config, data.task, seed)
    if config.builtin == "demo":
        return _open_demo(config, data.demo_examples, seed)
    return _open_hub(config) if is_remote(config) else _open_files(config, key)


def is_remote(config: "SourceConfig") -> bool:
    """Return whether a source is read from the hub: it has no path, or the path does not exist."""
    return config.hub is not None and (config.path is None or not Path(config.path).exists())


def is_absent(config: "SourceConfig") -> bool:
    """Return whether a source has only a local path, which does not exist."""
    return config.path is not None and config.hub is None and not Path(config.path).exists()


def _open_demo(config: "SourceConfig", examples: int, seed: int) -> Source:
    """Return the generated data: separate rows for each stage, and held-out rows."""

    def read(prefix: str, stage: str) -> list[Table]:
        kind = f"{prefix}{_DEMO_ROWS[stage]}"
        return [table_of(f"demo {kind}", _demo_rows(kind, examples, seed))]

    return Source("demo", config, partial(read, ""), partial(read, "held_out_"), dedicated=True)


@cache
def _demo_rows(kind: str, examples: int, seed: int) -> list[dict[str, Any]]:
    from pipeline.demo import rows_of

    return rows_of(kind, examples, seed)


def _open_tasks(config: "SourceConfig", task: "TaskConfig", seed: int) -> Source:
    """Return the questions and answers of a task of reasoning-gym, with held-out questions.

    A row contains question, answer and metadata, which the task's own scoring function needs.
    """

    def read(split: str, rows: int, _: str) -> list[Table]:
        return [_task_table(task, seed, split, rows)]

    return Source(task.name, config, partial(read, "train", task.rows), partial(read, "held out", task.held_out))


def _task_table(task: "TaskConfig", seed: int, split: str, rows: int) -> Table:
    """Return the rows of a split with different questions. The loader removes held-out questions from training."""
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(f"data.task.name={task.name} needs the package reasoning-gym: {pip_install('tasks')}") from None
    if task.name not in reasoning_gym.factory.DATASETS:
        near = ", ".join(get_close_matches(task.name, reasoning_gym.factory.DATASETS, 3, 0.3))
        raise UserError(f"data.task.name={task.name}: reasoning-gym has no such task. Similar names: {near}")
    # The task seeds row i with seed + i, so neighbouring seeds would share rows: the hash spreads them.
    seed = int.from_bytes(sha256(f"{seed} {split}".encode()).digest()[:4])
    try:
        made = reasoning_gym.create_dataset(task.name, **{**task.options, "seed": seed, "size": rows})
    except (TypeError, ValueError, AssertionError) as problem:
        raise UserError(
            f"data.task.options={task.options}: the task {task.name} refuses them: {problem}. Correct "
            "data.task.options (reasoning-gym documents the options of each task)"
        ) from problem
    by_question = {row["question"]: row for row in (made[index] for index in range(rows))}
    return table_of(f"{task.name} ({split})", [*by_question.values()])


def _open_files(config: "SourceConfig", key: str) -> Source:
    """Return a file or a folder. The held-out rows are in `eval_path` or in the test files of the folder."""
    assert config.path is not None
    train, held_out = data_files(config.path, key)
    if config.eval_path is not None:
        held_out = [*chain(*data_files(config.eval_path, key.removesuffix("path") + "eval_path"))]

    def read(files: Sequence[Path], _: str) -> list[Table]:
        return [_renamed(read_table(file), config.columns) for file in files]

    name = Path(config.path).name.split(".")[0] or config.path
    return Source(name, config, partial(read, train), partial(read, held_out) if held_out else None)


def _open_hub(config: "SourceConfig") -> Source:
    """Return a data set of the hub, read through the library `datasets`, which caches downloads."""
    hub = config.hub
    assert hub is not None

    def read(split: str, _: str) -> list[Table]:
        from pipeline.data.hub import load_split

        rows = load_split(config, split)
        content = rows.data
        columns = [name for name in rows.column_names if content.column(name).null_count < len(content)]
        table = Table(f"{hub} ({split})", rows, frozenset(columns), range(1, len(rows) + 1))
        return [_renamed(table, config.columns)]

    held_out = None if config.eval_split is None else partial(read, config.eval_split)
    return Source(hub, config, partial(read, config.split), held_out)


def _renamed(table: Table, columns: Mapping[str, str]) -> Table:
    """Return the table with its renamed columns under both names. `columns` is {name in the file: new name}."""
    if not columns:
        return table
    missing = sorted(set(columns) - table.columns)
    if missing:
        raise UserError(
            f"{table.name}: there is no column {', '.join(missing)}, which `columns` in data.sources renames. "
            f"Columns found: {', '.join(sorted(table.columns))}."
        )
    names = frozenset(columns.get(column, column) for column in table.columns)
    return replace(table, rows=_RenamedRows(table.rows, columns), columns=names)


@dataclass(frozen=True)
class _RenamedRows(Sequence[Row]):
    """Rows with their renamed columns under both names. A row of the hub is decoded when it is read."""

    rows: Sequence[Row]
    columns: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        row = self.rows[index]
        return {**row, **{new: row.get(name) for name, new in self.columns.items()}}


def _refusal(name: str, stage: str, bad: Sequence[tuple[str, str]], rows: int, limit: float) -> str:
    first: dict[str, str] = {}
    for position, reason in bad:
        first.setdefault(reason, position)
    counts = Counter(reason for _, reason in bad).most_common()
    reasons = ", ".join(f"{count} x {reason} (first: {first[reason]})" for reason, count in counts)
    share = math.ceil(100 * len(bad) / rows) / 100
    skip = f", or skip these rows with data.bad_row_limit={share:g}" if len(bad) < rows else ""
    return (
        f"{name}: {len(bad)} of {rows} rows cannot be used for {stage}: {reasons}. "
        f"data.bad_row_limit={limit:g} is the largest share: correct the file{skip}."
    )


def digest(record: Record) -> bytes:
    """Return the SHA-256 of the prompt of a record, with the roles of its messages, or of the text of a document."""
    return digest_of(prompt_of(record))


def first_turn(record: Record) -> bytes:
    """Return the SHA-256 of the first turn of a record, in lower case and with single spaces.

    The first turn is the system message, if there is one, and the first message of the user, or a document's text.
    Conversations with the same first turn may contain each other's prompts and answers.
    """
    messages = prompt_of(record)
    turn = messages[: 2 if messages[0].role == "system" else 1]
    return digest_of([Message(message.role, " ".join(message.content.casefold().split())) for message in turn])


def digest_of(messages: Sequence[Message]) -> bytes:
    parts = ((each.role, each.content, *filter(None, (each.fields, each.reasoning))) for each in messages)
    text = "\x1e".join(map("\x1f".join, parts))
    return sha256(text.encode("utf-8", "surrogatepass")).digest()
