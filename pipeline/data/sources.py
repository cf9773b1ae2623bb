"""Sources of rows: local files, data sets of the Hugging Face hub, and generated data (the demo, reasoning-gym)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.data.files import Table, data_files, find, read_table, table_of
from pipeline.errors import UserError
from pipeline.installation import pip_install

if TYPE_CHECKING:
    from pipeline.config.schema import DataConfig, SourceConfig, TaskConfig

_DEMO_ROWS = {"sft": "conversations", "reward": "preferences", "ppo": "prompts"}


class Source(Protocol):
    """A source of rows. `train` and `held_out` read the data; the constructor does not."""

    name: str

    @property
    def has_held_out(self) -> bool:
        """Whether the source has held-out rows; otherwise a share of the training rows is held out."""

    @property
    def dedicated(self) -> bool:
        """Whether the source has separate rows for each stage, so that stages do not divide rows."""

    def train(self, stage: str) -> list[Table]: ...

    def held_out(self, stage: str) -> list[Table]: ...


def configured_sources(data: "DataConfig") -> list["SourceConfig"]:
    """Return the sources of a data configuration. `data.path` replaces the list."""
    from pipeline.config.schema import SourceConfig

    return list(data.sources) if data.path is None else [SourceConfig(path=data.path)]


def open_source(config: "SourceConfig", data: "DataConfig", *, seed: int, key: str = "data.path") -> Source:
    """Return the source for a configuration. Error messages call its path `key`. `seed` generates rows.

    If both `path` and `hub` are set, `path` is read if it exists, otherwise the hub.
    """
    if config.builtin == "tasks":
        return TaskSource(data.task, seed)
    if config.builtin == "demo":
        return DemoSource(data.demo_examples, seed)
    return HubSource(config) if is_remote(config) else LocalSource(config, key)


def is_remote(config: "SourceConfig") -> bool:
    """Return whether a source is read from the hub: it has no path, or the path does not exist."""
    return config.hub is not None and (config.path is None or find(config.path) is None)


def is_absent(config: "SourceConfig") -> bool:
    """Return whether a source has only a local path, which does not exist."""
    return config.path is not None and config.hub is None and find(config.path) is None


class DemoSource:
    """The generated data: separate rows for each stage, and held-out rows."""

    name = "demo"
    has_held_out = True
    dedicated = True

    def __init__(self, examples: int, seed: int) -> None:
        self._examples, self._seed = examples, seed

    def train(self, stage: str) -> list[Table]:
        return [self._table(_DEMO_ROWS[stage])]

    def held_out(self, stage: str) -> list[Table]:
        return [self._table(f"held_out_{_DEMO_ROWS[stage]}")]

    def _table(self, kind: str) -> Table:
        return table_of(f"demo {kind}", _demo_rows(kind, self._examples, self._seed))


@cache
def _demo_rows(kind: str, examples: int, seed: int) -> list[dict[str, Any]]:
    from pipeline.demo import rows_of

    return rows_of(kind, examples, seed)


class TaskSource:
    """The questions and answers of a task of reasoning-gym, with held-out questions.

    A row contains question, answer and metadata, which the task's own scoring function needs.
    """

    dedicated = False
    has_held_out = True

    def __init__(self, task: "TaskConfig", seed: int) -> None:
        self.name, self._task, self._seed = task.name, task, seed

    def train(self, stage: str) -> list[Table]:
        return [self._table("train", self._task.rows)]

    def held_out(self, stage: str) -> list[Table]:
        return [self._table("held out", self._task.held_out)]

    def _table(self, split: str, rows: int) -> Table:
        """Return the rows of a split with different questions. The loader removes held-out questions from training."""
        try:
            import reasoning_gym
        except ImportError:
            raise UserError(
                f"data.task.name={self.name} needs the package reasoning-gym: {pip_install('tasks')}"
            ) from None
        if self.name not in reasoning_gym.factory.DATASETS:
            near = ", ".join(get_close_matches(self.name, reasoning_gym.factory.DATASETS, 3, 0.3))
            raise UserError(f"data.task.name={self.name}: reasoning-gym has no such task. Similar names: {near}")
        # The task seeds row i with seed + i, so neighbouring seeds would share rows: the hash spreads them.
        seed = int.from_bytes(sha256(f"{self._seed} {split}".encode()).digest()[:4])
        try:
            made = reasoning_gym.create_dataset(self.name, **{**self._task.options, "seed": seed, "size": rows})
        except (TypeError, ValueError, AssertionError) as problem:
            raise UserError(
                f"data.task.options={self._task.options}: the task {self.name} refuses them: {problem}. Correct "
                "data.task.options (reasoning-gym documents the options of each task)"
            ) from problem
        by_question = {row["question"]: row for row in (made[index] for index in range(rows))}
        return table_of(f"{self.name} ({split})", [*by_question.values()])


class LocalSource:
    """A file or a folder. The held-out rows are in `eval_path` or in the test files of the folder."""

    dedicated = False

    def __init__(self, config: "SourceConfig", key: str) -> None:
        assert config.path is not None
        self._columns = config.columns
        self._train, self._held_out = data_files(config.path, key)
        if config.eval_path is not None:
            train, held_out = data_files(config.eval_path, key.removesuffix("path") + "eval_path")
            self._held_out = train + held_out
        self.name = Path(config.path).name.split(".")[0] or config.path

    @property
    def has_held_out(self) -> bool:
        return bool(self._held_out)

    def train(self, stage: str) -> list[Table]:
        return [_renamed(read_table(file), self._columns) for file in self._train]

    def held_out(self, stage: str) -> list[Table]:
        return [_renamed(read_table(file), self._columns) for file in self._held_out]


class HubSource:
    """A data set of the hub, read through the library `datasets`, which caches downloads."""

    dedicated = False

    def __init__(self, config: "SourceConfig") -> None:
        assert config.hub is not None
        self._config = config
        self.name = config.hub

    @property
    def has_held_out(self) -> bool:
        return self._config.eval_split is not None

    def train(self, stage: str) -> list[Table]:
        return [self._table(self._config.split)]

    def held_out(self, stage: str) -> list[Table]:
        return [self._table(self._config.eval_split)] if self._config.eval_split is not None else []

    def _table(self, split: str) -> Table:
        from pipeline.data.hub import load_split

        config = self._config
        assert config.hub is not None
        rows = load_split(config.hub, config.subset, split)
        name = f"{config.hub} ({split})"
        return _renamed(Table(name, rows, frozenset(rows.column_names), range(1, len(rows) + 1)), config.columns)


def _renamed(table: Table, columns: Mapping[str, str]) -> Table:
    """Return the table with renamed columns: `columns` is {name in the file: new name}."""
    if not columns:
        return table
    missing = sorted(set(columns) - table.columns)
    if missing:
        raise UserError(
            f"{table.name}: there is no column {', '.join(missing)}, which `columns` in data.sources renames. "
            f"Columns found: {', '.join(sorted(table.columns))}."
        )
    renamed = frozenset(columns.get(column, column) for column in table.columns)
    return replace(table, rows=_RenamedRows(table.rows, columns), columns=renamed)


class _RenamedRows(Sequence[Mapping[str, Any]]):
    """Rows with renamed keys, made on access, so that a hub data set stays on disk."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
        self._rows, self._columns = rows, columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        return {**row, **{ours: row.get(theirs) for theirs, ours in self._columns.items()}}
