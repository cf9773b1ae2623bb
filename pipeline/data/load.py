"""Read, check, split and mix the sources of a stage.

The splits depend on the first turn of the conversations only: the system message and the first message of the user.
The SHA-256 of a first turn gives two fixed points in [0, 1): one decides whether the conversation is held out, the
other which stage trains on it. So the splits do not depend on ranks, machine, order or seed, all sources agree on them,
and a change of one share does not change the other split. A conversation and its continuations are always on the same
side.
"""

import gc
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.config.stages import STAGES
from pipeline.data.formats import RENAME, STAGES_BY_FORM, stages_of
from pipeline.data.records import Prompt, Record
from pipeline.data.sources import RecordTable, Source, configured_sources, digest, is_absent, is_remote, open_source
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.config.schema import DataConfig

RESERVED = "reserved for other stages"  # why a stage does not train on a row of a shared source
OVERWEIGHT = "more than the source's weight"
EVALUATED = ("ppo", "sft", "reward")  # evaluation prompts come from the sources of the first of these that has some
HELD_OUT = "prompt is held out"  # the first turn of the row is that of a held-out row

_Row = tuple[Record, bytes, RecordTable]  # the record, the digest of its first turn, and its table


@dataclass(frozen=True)
class StageRecords:
    """Training and held-out records of a stage: Conversation or Document (sft), Preference (reward, dpo), Prompt (ppo).

    No stage trains on a conversation that starts like one of `held_out`. `held_out` is sorted by the hash of the
    prompt, so its first N records are a fair sample of all sources. `skipped` counts the excluded rows by reason.
    """

    train: Sequence[Any]
    held_out: list[Any]
    skipped: dict[str, int]


class DataReader:
    """Reads the data of a run. Each file is read and each row is parsed once, for all stages.

    seed: selects rows if sources are mixed by weight, and generates the rows of the demo; the splits of files do not
        depend on it
    labels: dpo also reads answers with a label (LabelledAnswer), and sft imitates the desirable ones only
    keeps_rows: prompts store the rows that they were read from
    """

    def __init__(self, data: "DataConfig", seed: int, *, labels: bool = False, keeps_rows: bool = False) -> None:
        self.data, self.seed, self.labels, self.keeps_rows = data, seed, labels, keeps_rows
        self._opened: dict[int, Source] = {}

    def stage(self, stage: str) -> StageRecords:
        """Return the records of one stage ("sft", "reward", "dpo" or "ppo").

        Raises UserError if the data is missing, damaged or has no records for the stage.
        """
        with _paused_collection():
            return _Loading(self, stage, STAGES[stage].reads).records()

    def held_out(self) -> list[Prompt]:
        """Return the held-out prompts that policies answer in evaluations. Raises UserError as `stage` does.

        They come from the sources of the first stage of `EVALUATED` that has some.
        """
        with _paused_collection():
            found = (_Loading(self, "ppo", kind).held_out() for kind in EVALUATED)
            return next((prompts for prompts in found if prompts), [])

    def sources(self, kind: str) -> list[Source]:
        """Return the opened sources. A missing file is left out if no stage `kind` reads it."""
        configs = configured_sources(self.data)
        prefix = "data.path" if self.data.path is not None else "data.sources.{}.path"
        for index, config in enumerate(configs):
            if index not in self._opened and (kind in config.stages or not is_absent(config)):
                key = prefix.format(index)
                source = open_source(config, self.data, seed=self.seed, key=key)
                self._opened[index] = replace(source, keeps_rows=self.keeps_rows)
        return [self._opened[index] for index in sorted(self._opened)]

    def keep_only(self, stages: Sequence[str]) -> None:
        """Free the records of the sources that none of these stages reads."""
        kinds = {STAGES[stage].reads for stage in stages}
        self._opened = {index: source for index, source in self._opened.items() if kinds & {*source.config.stages}}


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Pause the garbage collection, which would visit millions of new records again and again: they form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_stage(data: "DataConfig", stage: str, seed: int, *, labels: bool = False) -> StageRecords:
    """Return the records of a single stage. The arguments are those of `DataReader`."""
    return DataReader(data, seed, labels=labels).stage(stage)


def is_generated(data: "DataConfig", stage: str) -> bool:
    """Return whether a stage trains on data that zerochat generates, completely or in part."""
    return any(source.builtin for source in configured_sources(data) if STAGES[stage].reads in source.stages)


class _Loading:
    """Loads the records for `stage` from the sources with `kind` in their stages, and counts skipped rows by reason."""

    def __init__(self, reader: DataReader, stage: str, kind: str) -> None:
        self.reader, self.data, self.stage, self.kind = reader, reader.data, stage, kind
        self.own_shares = STAGES[stage].shares  # the keys of data.stage_shares whose prompts this stage reads
        self.skipped: Counter[str] = Counter()
        self.unused: list[RecordTable] = []
        self.sources = reader.sources(kind)

    def records(self) -> StageRecords:
        parts = self._split_sources()
        if not parts:
            raise UserError(_no_data(self.data, self.stage, self.unused))
        train = self._mixed([(each, self._share(each, rows, len(rest))) for each, rows, rest in parts])
        held_out = sorted((record for *_, rest in parts for record in rest), key=digest)
        return StageRecords(train, held_out, dict(self.skipped))

    def held_out(self) -> list[Prompt]:
        prompts = (record for *_, rest in self._split_sources() for record in rest if isinstance(record, Prompt))
        return sorted(prompts, key=digest)

    def _split_sources(self) -> list[tuple[Source, list[_Row], list[Record]]]:
        """Return each source with its training rows (of all stages) and its held-out records."""
        read: list[tuple[Source, list[_Row]]] = []
        for each in self.sources:
            tables = each.tables(self.kind) if self.kind in each.config.stages else []
            used = [table for table in tables if self.kind in self._form_stages(each, table)]
            self.unused += [table for table in tables if self.kind not in self._form_stages(each, table)]
            if used:
                read.append((each, self._records(used)))
        turns = self._held_out_turns(read)
        return [(each, *self._split(each, rows, turns)) for each, rows in read]

    def _held_out_turns(self, read: Sequence[tuple[Source, list[_Row]]]) -> set[bytes]:
        """Return the held-out first turns.

        They are those of the held-out rows of all sources. If a source has no such rows, they also include a share of
        all first turns by hash, and at least one first turn of each source that this stage or an evaluation reads.
        """
        turns = set[bytes]()
        for each in self.sources:
            for table in _every_held_out(each):
                turns |= table.turns()
        own = [(each, {turn for _, turn, _ in rows}) for each, rows in read]
        if any(each.held_out is None for each in self.sources):
            every = set[bytes]().union(*(found for _, found in own))
            turns |= {turn for turn in every if held_out_point(turn) < self.data.eval_fraction}
        own += self._evaluated_turns()
        return turns.union(*(_at_least_one(turns, found) for each, found in own if each.held_out is None))

    def _evaluated_turns(self) -> Iterator[tuple[Source, set[bytes]]]:
        """Yield the sources of evaluation prompts that the stage does not read, with their first turns.

        Data sets of the hub are left out: they are large, so the share by hash holds some of their rows out.
        """
        kinds = {kind for each in self.sources for kind in each.config.stages}
        kind = next(kind for kind in EVALUATED if kind in kinds)
        sources = [] if kind == self.kind else [each for each in self.sources if kind in each.config.stages]
        for each in sources:
            if each.held_out is None and not is_remote(each.config):
                used = (table for table in each.tables(kind) if kind in self._form_stages(each, table))
                yield each, set[bytes]().union(*(table.turns() for table in used))

    def _split(self, each: Source, rows: list[_Row], turns: set[bytes]) -> tuple[list[_Row], list[Record]]:
        """Return the training rows and the held-out records of one source."""
        train = [row for row in rows if row[1] not in turns]
        if each.held_out is None:
            held_out = [record for record, turn, _ in rows if turn in turns]
        else:
            self._count(HELD_OUT, len(rows) - len(train))
            tables = each.tables(self.kind, held_out=True)
            own = [table for table in tables if self.kind in self._form_stages(each, table)]
            held_out = [record for record, *_ in self._records(own)]
        if self.stage == "ppo":
            unique = list(dict.fromkeys(held_out))
            self._count("repeats another held-out prompt", len(held_out) - len(unique))
            held_out = unique
        return train, held_out

    def _share(self, each: Source, train: list[_Row], held_out: int) -> list[Record]:
        """Return the training records of this stage. `held_out` is the number of held-out records, for the message."""
        shares = {name: self._shares(each, table) for name, table in {t.name: t for _, _, t in train}.items()}
        records = [record for record, turn, table in train if stage_of(turn, shares[table.name]) in self.own_shares]
        self._count(RESERVED, len(train) - len(records))
        if not records:
            raise UserError(
                f"{each.name}: no usable row is left for stage {self.stage}: {held_out} are held out (rows with the "
                f"same first message together), and {len(train)} belong to other stages. Add data, or change "
                "data.eval_fraction or data.stage_shares."
            )
        return records

    def _form_stages(self, each: Source, table: RecordTable) -> list[str]:
        """Return the stages that divide the rows of this table among them."""
        readers = stages_of(table.form, labels=self.reader.labels)
        return [stage for stage in each.config.stages if stage in readers]

    def _records(self, tables: Sequence[RecordTable]) -> list[_Row]:
        """Return the records of tables of one source for the stage.

        Equal ones from preferences and labels are merged: they often share their prompt, and chosen answer.
        """
        limit, labels = self.data.bad_row_limit, self.reader.labels
        rows, merged = list[_Row](), set[tuple[Record, bytes]]()
        for table in tables:
            records, skipped = table.for_stage(self.stage, limit, labels=labels)
            self.skipped.update(skipped)
            if self.kind != "reward" and table.form in ("preferences", "labelled"):
                unique = [each for each in dict.fromkeys(records) if each not in merged]
                self._count("repeats another row", len(records) - len(unique))
                merged.update(unique)
                records = unique
            rows += [(*record, table) for record in records]
        return rows

    def _shares(self, each: Source, table: RecordTable) -> dict[str, float]:
        """Return the shares of a table by stage."""
        stages = self._form_stages(each, table)
        if each.dedicated or stages == [self.kind]:
            return {self.own_shares[0]: 1.0}  # this stage reads the complete table
        return {str(name): share for name, share in self.data.stage_shares.items() if name in stages}

    def _mixed(self, parts: list[tuple[Source, list[Record]]]) -> list[Record]:
        sizes = [len(train) for _, train in parts]
        weights = [each.config.weight for each, _ in parts if each.config.weight is not None]
        used = sizes if len(parts) == 1 or len(weights) < len(parts) else mixed_sizes(sizes, weights)
        self._count(OVERWEIGHT, sum(sizes) - sum(used))
        mixed: list[Record] = []
        for index, ((_, train), size) in enumerate(zip(parts, used, strict=True)):
            chosen = random.Random(f"{self.reader.seed} {index}").sample(range(len(train)), size)
            mixed += [train[row] for row in sorted(chosen)]
        return mixed

    def _count(self, reason: str, rows: int) -> None:
        if rows:
            self.skipped[reason] += rows


def _every_held_out(each: Source) -> Iterator[RecordTable]:
    """Yield the held-out tables of all stages of a source that has held-out rows."""
    if each.held_out is None:
        return
    for stage in each.config.stages if each.dedicated else each.config.stages[:1]:
        yield from each.tables(stage, held_out=True)


def _at_least_one(held_out: Set[bytes], turns: set[bytes]) -> set[bytes]:
    """Return the first turn with the smallest hash if none of `turns` is held out, otherwise an empty set."""
    return set() if not turns or turns & held_out else {min(turns, key=held_out_point)}


def _no_data(data: "DataConfig", stage: str, unused: Sequence[RecordTable]) -> str:
    found = [
        f"{each.name} (columns {', '.join(sorted(each.table.columns))}) has {each.form}, for "
        f"{', '.join(STAGES_BY_FORM[each.form])}{', and dpo with dpo=kto' if each.form == 'labelled' else ''}"
        for each in unused
    ]
    ways = ["run only stages that use this data (stage=NAME)", "set data.path=FILE or data=NAME to other data"]
    if stage == "reward":
        ways.append("run PPO without a reward model (ppo.reward_model=false ppo.reward_function=FILE.py:NAME)")
    return (
        f"Stage {stage} needs {STAGES[stage].needs}, and data={data.name} has none: "
        f"{'; '.join(found) or 'no source lists the stage'}. Choose one: {'; '.join(ways)}. {RENAME}."
    )


def held_out_point(turn: bytes) -> float:
    """Return a point in [0, 1) from the first 53 bits; points below the held-out share are held out."""
    return (int.from_bytes(turn[:8], "big") >> 11) / 2**53


def stage_point(turn: bytes) -> float:
    """Return a point in [0, 1) that is independent of `held_out_point`."""
    return (int.from_bytes(turn[8:16], "big") >> 11) / 2**53


def stage_of(turn: bytes, shares: Mapping[str, float]) -> str:
    """Return the stage that trains on a first turn, "" if none does. `shares` are relative; their sum need not be 1."""
    stages = [stage for stage in STAGES if shares.get(stage, 0.0) > 0]
    total = sum(shares[stage] for stage in stages)
    point, edge = stage_point(turn) * total, 0.0
    for stage in stages[:-1]:
        edge += shares[stage]
        if point < edge:
            return stage
    return stages[-1] if stages else ""


def mixed_sizes(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the numbers of rows of the largest mix of sources in the ratio of `weights`, without repeated rows.

    The mix uses all rows of the source that has the fewest for its weight.
    """
    largest = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(1, min(size, round(largest * weight))) for size, weight in zip(sizes, weights, strict=True)]
