"""The records of a stage: its sources are read, checked, split and mixed.

The splits depend on the text of the prompts only. The SHA-256 of a prompt gives two fixed points in [0, 1): one decides
whether the prompt is held out, the other which stage trains on it. So the splits do not depend on ranks, machine, order
or seed, all sources agree on them, and a change of one share does not change the other split.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.stages import STAGES
from pipeline.data.files import Table
from pipeline.data.formats import FORMS_TEXT, RENAME, SERVES, Record, detect, to_records
from pipeline.data.records import Conversation, Message, Preference, Prompt
from pipeline.data.sources import Source, configured_sources, is_absent, open_source
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.config.schema import DataConfig, SourceConfig

log = logging.getLogger(__name__)

RESERVED = "reserved for other stages"  # why a stage does not train on a row of a shared source

_Row = tuple[Record, bytes, Table]  # with the digest of its prompt, and where it stands


@dataclass(frozen=True)
class StageRecords:
    """What a stage trains on and is measured on: Conversation (sft), Preference (reward, dpo) or Prompt (ppo).

    No prompt of `held_out` stands in the training records of any stage. `held_out` is in the order of the prompts'
    hashes, so its first N are a fair sample of all sources. `skipped` counts the rows left out, by reason.
    """

    train: list[Any]
    held_out: list[Any]
    skipped: dict[str, int]


@dataclass(frozen=True)
class _Configured:
    """A source with the configuration it came from."""

    source: Source
    config: "SourceConfig"

    def form_stages(self, table: Table) -> list[str]:
        """The stages that this source's rows of this form are shared out to."""
        return [stage for stage in self.config.stages if stage in SERVES[detect(table.columns, table.name)]]


@dataclass(frozen=True)
class _Evaluation:
    """Prompts that no stage may train on: those with a digest in `prompts` or a hash below `share`."""

    prompts: frozenset[bytes]
    share: float

    def __contains__(self, prompt: bytes) -> bool:
        return held_out_point(prompt) < self.share or prompt in self.prompts


def load_stage(data: "DataConfig", stage: str, seed: int, *, rows: bool = False) -> StageRecords:
    """Reads the data of one stage ("sft", "reward", "dpo" or "ppo").

    `seed` chooses the rows that stay where sources of unequal supply are mixed; the splits don't depend on it. With
    `rows` prompts keep the rows that they were read from.
    Raises UserError for data that is missing, broken or of no use to the stage.
    """
    return _Loading(data, stage, rows, STAGES[stage].reads).records(seed)


def load_held_out(data: "DataConfig", *, rows: bool = False) -> list[Prompt]:
    """The prompts that policies answer while they are not trained: those that PPO's sources hold out, whatever share of
    the others PPO has; where no source lists ppo those of SFT's, or else of the pairs'. With `rows` they keep the rows
    that they were read from. Raises UserError for data that is missing or broken.
    """
    found = (_Loading(data, "ppo", rows, kind).held_out() for kind in ("ppo", "sft", "reward"))
    return next((prompts for prompts in found if prompts), [])


def made_here(data: "DataConfig", stage: str) -> bool:
    """Whether zerochat makes what a stage trains on itself, or some of it, so that there is something."""
    return any(source.builtin for source in configured_sources(data) if STAGES[stage].reads in source.stages)


class _Loading:
    """The work of `load_stage`, and of `load_held_out`: records for `stage` of the sources that list `kind`. Gathers
    counts on the way.
    """

    def __init__(self, data: "DataConfig", stage: str, rows: bool, kind: str) -> None:
        self.data, self.stage, self.kind, self.rows = data, stage, kind, rows
        self.skipped: Counter[str] = Counter()
        self.unfit: list[Table] = []
        self.sources = _open(data, self.kind)
        self.aside = _held_out_prompts(self.sources, data)

    def records(self, seed: int) -> StageRecords:
        parts: list[tuple[_Configured, list[Record]]] = []
        held_out: list[Record] = []
        for each, rows, rest in self._apart():
            parts.append((each, self._share(each, rows, len(rest))))
            held_out += rest
        if not parts:
            raise UserError(_no_data(self.data, self.stage, self.unfit))
        held_out = sorted(held_out, key=digest)
        train = self._mixed(self._without(parts, held_out), seed)
        return StageRecords(train, held_out, dict(self.skipped))

    def held_out(self) -> list[Prompt]:
        prompts = (record for *_, rest in self._apart() for record in rest if isinstance(record, Prompt))
        return sorted(prompts, key=digest)

    def _apart(self) -> Iterator[tuple[_Configured, list[_Row], list[Record]]]:
        """Each source that has rows for the stage, with those to train on, of all stages, and the held-out records."""
        for each in self.sources:
            if self.kind not in each.config.stages:
                continue
            tables = each.source.train(self.kind)
            fit = [table for table in tables if self.kind in each.form_stages(table)]
            self.unfit += [table for table in tables if table not in fit]
            if fit:
                yield each, *self._split(each, fit)

    def _split(self, each: _Configured, tables: list[Table]) -> tuple[list[_Row], list[Record]]:
        """(rows to train on, held-out records) of one source."""
        rows = [(record, digest(record), table) for table in tables for record in self._parse(each, table)]
        aside = self.aside
        if each.source.has_held_out:
            own = [t for t in each.source.held_out(self.kind) if self.kind in each.form_stages(t)]
            held_out = [record for table in own for record in self._parse(each, table)]
        else:
            aside = _at_least_one(aside, {prompt for _, prompt, _ in rows}, each.source.name)
            held_out = [record for record, prompt, _ in rows if prompt in aside]
        train = [row for row in rows if row[1] not in aside]
        if each.source.has_held_out:
            self._count("prompt is held out", len(rows) - len(train))
        return train, self._once(held_out, "repeats another held-out prompt") if self.stage == "ppo" else held_out

    def _share(self, each: _Configured, train: list[_Row], held_out: int) -> list[Record]:
        """This stage's share of a source's records, of which so many are held out."""
        shares = {name: self._shares(each, table) for name, table in {t.name: t for _, _, t in train}.items()}
        mine = [record for record, prompt, table in train if self._is_mine(shares[table.name], prompt)]
        self._count(RESERVED, len(train) - len(mine))
        if not mine:
            raise UserError(
                f"{each.source.name}: none of its usable rows is left for stage {self.stage}: {held_out} are held out, "
                f"and {len(train)} were shared between the stages. Give more data, another data.eval_fraction, or "
                "other data.stage_shares."
            )
        return mine

    def _parse(self, each: _Configured, table: Table) -> list[Record]:
        parsed = to_records(table, self.stage, each.source.name, self.data.bad_row_limit, rows=self.rows)
        self.skipped.update(parsed.skipped)
        if self.kind == "reward" or detect(table.columns) != "preferences":
            return parsed.records
        return self._once(parsed.records, "repeats another row")  # pairs often share their prompt, and chosen answer

    def _once(self, records: list[Record], told: str) -> list[Record]:
        """Each of the records once; how many were left out is counted under what is `told` of them."""
        unique = list(dict.fromkeys(records))
        self._count(told, len(records) - len(unique))
        return unique

    def _shares(self, each: _Configured, table: Table) -> dict[str, float] | None:
        """The stages' shares of a table; None where it is all this stage's."""
        stages = each.form_stages(table)
        if each.source.dedicated or stages == [self.kind]:
            return None
        shares = {str(name): share for name, share in self.data.stage_shares.items() if name in stages}
        if sum(shares.get(name, 0.0) for name in self._own) <= 0:
            advice = f"give {' or '.join(self._own)} a share."
            raise UserError(f"data.stage_shares gives {self.stage} nothing of {each.source.name}: {advice}")
        return shares

    def _is_mine(self, shares: dict[str, float] | None, prompt: bytes) -> bool:
        return shares is None or stage_of(prompt, shares) in self._own

    @property
    def _own(self) -> tuple[str, ...]:
        """The names in data.stage_shares whose prompts are this stage's."""
        return STAGES[self.stage].shares

    def _without(
        self, parts: list[tuple[_Configured, list[Record]]], held_out: list[Record]
    ) -> list[tuple[_Configured, list[Record]]]:
        """The parts without prompts that another part holds out."""
        prompts = {digest(record) for record in held_out}
        kept = [(each, [record for record in train if digest(record) not in prompts]) for each, train in parts]
        self._count("prompt is held out", sum(len(train) for _, train in parts) - sum(len(train) for _, train in kept))
        return kept

    def _mixed(self, parts: list[tuple[_Configured, list[Record]]], seed: int) -> list[Record]:
        sizes = [len(train) for _, train in parts]
        weights = [each.config.weight for each, _ in parts if each.config.weight is not None]
        used = sizes if len(parts) == 1 or len(weights) < len(parts) else mixed_sizes(sizes, weights)
        self._count("more than the source's weight", sum(sizes) - sum(used))
        mixed: list[Record] = []
        for place, ((each, train), size) in enumerate(zip(parts, used, strict=True)):
            chosen = random.Random(f"{seed} {place}").sample(range(len(train)), size)
            mixed += [train[index] for index in sorted(chosen)]
            log.info("%s: %d of %d rows of %s", self.stage, size, len(train), each.source.name)
        return mixed

    def _count(self, reason: str, rows: int) -> None:
        if rows:
            self.skipped[reason] += rows


def _open(data: "DataConfig", kind: str) -> list[_Configured]:
    """The sources. One whose file is not there is left out where this stage would read nothing of it."""
    configs = configured_sources(data)
    keys = ["data.path" if data.path is not None else f"data.sources.{i}.path" for i in range(len(configs))]
    opened = []
    for config, key in zip(configs, keys, strict=True):
        if kind not in config.stages and is_absent(config):
            log.info("%s=%s is not there: left out, it serves %s alone", key, config.path, ", ".join(config.stages))
        else:
            opened.append(_Configured(open_source(config, demo_examples=data.demo_examples, key=key), config))
    return opened


def _held_out_prompts(sources: Sequence[_Configured], data: "DataConfig") -> _Evaluation:
    """What is held out by any source for any stage: its own held-out rows, or a share by hash where it has none."""
    own = [each for each in sources if each.source.has_held_out]
    prompts = {digest(record) for each in own for record in _every_held_out(each)}
    return _Evaluation(frozenset(prompts), data.eval_fraction if len(own) < len(sources) else 0.0)


def _every_held_out(each: _Configured) -> Iterator[Record]:
    for stage in each.config.stages if each.source.dedicated else each.config.stages[:1]:
        for table in each.source.held_out(stage):
            fitting = stage if stage in (serves := SERVES[detect(table.columns, table.name)]) else serves[0]
            yield from to_records(table, fitting, each.source.name, bad_row_limit=1.0).records


def _at_least_one(aside: _Evaluation, prompts: Set[bytes], name: str) -> _Evaluation:
    """`aside`, and in a source too small for the share to catch a prompt, the prompt with the smallest hash."""
    if not prompts or any(prompt in aside for prompt in prompts):
        return aside
    if len(prompts) == 1:
        raise UserError(
            f"{name}: all rows that can be used have one prompt, and one is held out; add rows with other prompts."
        )
    return _Evaluation(aside.prompts | {min(prompts, key=held_out_point)}, aside.share)


def _no_data(data: "DataConfig", stage: str, unfit: Sequence[Table]) -> str:
    forms = [detect(table.columns) for table in unfit]
    found = [
        f"{table.name} (columns {', '.join(sorted(table.columns))}) holds {form}, which serve {', '.join(SERVES[form])}"
        for table, form in zip(unfit, forms, strict=True)
    ]
    alone = f"a stage that these serve (stage={SERVES[forms[0]][0]})" if forms else "another stage"
    return (
        f"Stage {stage} needs {STAGES[stage].needs}, and data={data.name} has none: "
        f"{'; '.join(found) or 'no source lists the stage'}. Give data.path=FILE or another data=NAME, or run "
        f"{alone}. Understood are: {FORMS_TEXT}. {RENAME}."
    )


def digest(record: Conversation | Preference | Prompt) -> bytes:
    """Return the SHA-256 of the prompt of a record: every message before the answer, with its role."""
    if isinstance(record, Conversation):
        return digest_of(record.messages[:-1])
    return digest_of(record.prompt if isinstance(record, Preference) else record.messages)


def digest_of(messages: Sequence[Message]) -> bytes:
    text = "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def held_out_point(prompt: bytes) -> float:
    """Return a point in [0, 1) from the first 53 bits; points below the held-out share are held out."""
    return (int.from_bytes(prompt[:8], "big") >> 11) / 2**53


def stage_point(prompt: bytes) -> float:
    """Return a point in [0, 1) that is independent of `held_out_point`."""
    return (int.from_bytes(prompt[8:16], "big") >> 11) / 2**53


def stage_of(prompt: bytes, shares: Mapping[str, float]) -> str:
    """Return the stage that trains on a prompt. `shares` are relative; their sum need not be 1."""
    stages = [stage for stage in STAGES if shares.get(stage, 0.0) > 0]
    total = sum(shares[stage] for stage in stages)
    point, edge = stage_point(prompt) * total, 0.0
    for stage in stages[:-1]:
        edge += shares[stage]
        if point < edge:
            return stage
    return stages[-1]


def mixed_sizes(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the numbers of rows of the largest mix of sources in the ratio of `weights`, without repeated rows.

    The mix uses all rows of the source that has the fewest for its weight.
    """
    largest = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(1, min(size, round(largest * weight))) for size, weight in zip(sizes, weights, strict=True)]
