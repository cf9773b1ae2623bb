"""Records become token sequences that fit: what is too long is cut, or dropped where a cut makes no sense.

| record | longer than max_length |
| --- | --- |
| conversation | cut from the right; dropped if no token that counts is left |
| preference | answers are cut, without an end token then; dropped if the prompt leaves no room, or both became equal |
| prompt | dropped |
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.data.records import Conversation, Preference, Prompt, Row
from pipeline.data.token_rows import Items, TokenRows
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Record = TypeVar("Record")
CHUNK = 2048  # records that are lists of ids at a time
SECONDS_A_LINE = 10.0


@dataclass(frozen=True, eq=False)
class TokenItem:
    """ids (T,); counts (T,): True where the loss counts this token."""

    ids: Ids
    counts: Flags


@dataclass(frozen=True, eq=False)
class PairItem:
    """chosen (T1,) and rejected (T2,): prompt and answer; margin in the labeller's unit; prompt: tokens of that."""

    chosen: Ids
    rejected: Ids
    margin: float
    source: str
    prompt: int


class TokenItems(Items[TokenItem]):
    """Items that are made when they are asked for."""

    def __init__(self) -> None:
        self._ids, self._counts = TokenRows(), TokenRows("b")

    def append(self, ids: Sequence[int], counts: Sequence[bool]) -> None:
        self._ids.append(ids)
        self._counts.append(counts)

    def __len__(self) -> int:
        return len(self._ids)

    def at(self, place: int) -> TokenItem:
        return TokenItem(self._ids.view(place), self._counts.view(place).view(np.bool_))


class PairItems(Items[PairItem]):
    """Pairs that are made when they are asked for."""

    def __init__(self) -> None:
        self._chosen, self._rejected = TokenRows(), TokenRows()
        self._labels: list[tuple[float, str, int]] = []

    def append(
        self, prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], margin: float, source: str
    ) -> None:
        """Two answers to a prompt."""
        self._chosen.append([*prompt, *chosen])
        self._rejected.append([*prompt, *rejected])
        self._labels.append((margin, source, len(prompt)))

    def __len__(self) -> int:
        return len(self._labels)

    def at(self, place: int) -> PairItem:
        return PairItem(self._chosen.view(place), self._rejected.view(place), *self._labels[place])


@dataclass(frozen=True, eq=False)
class PromptItems:
    """Prompts, each with its generation prompt, and the data's rows where the records kept them."""

    ids: TokenRows = field(default_factory=TokenRows)
    rows: list[Row] = field(default_factory=list)


def encode_conversations(
    tokenizer: ChatTokenizer,
    records: Sequence[Conversation],
    *,
    max_length: int,
    loss_on: str = "assistant",
    name: str = "conversations",
) -> tuple[TokenItems, Counter[str]]:
    """(items, what was cut or dropped). `loss_on`: "assistant" counts answers and their ends, "all" every token.

    Raises UserError where nothing is left; `name` is what it calls the records.
    """
    notes: Counter[str] = Counter()
    items = TokenItems()
    for chunk in _chunks(records, name):
        for ids, answers in tokenizer.encode_conversations([record.messages for record in chunk]):
            counts = answers[:max_length] if loss_on == "assistant" else [True] * min(len(ids), max_length)
            if not any(counts[1:]):
                notes["no answer within max_length"] += 1
                continue
            notes["cut to max_length"] += len(ids) > max_length
            items.append(ids[:max_length], counts)
    _check(items, records, f"{name} none reaches its answer", max_length, "sft.max_length")
    return items, +notes


def encode_preferences(
    tokenizer: ChatTokenizer,
    records: Sequence[Preference],
    *,
    max_length: int,
    name: str = "pairs",
    stage: str = "reward",
) -> tuple[PairItems, Counter[str]]:
    """(pairs, what was cut or dropped). Raises UserError where nothing is left; `name` is what it calls the records,
    and `stage` has the limit.
    """
    notes: Counter[str] = Counter()
    pairs = PairItems()
    for chunk in _chunks(records, name):
        prompts = tokenizer.encode_prompts([record.prompt for record in chunk])
        answers = tokenizer.encode_answers([text for record in chunk for text in (record.chosen, record.rejected)])
        for record, prompt, chosen, rejected in zip(chunk, prompts, answers[::2], answers[1::2], strict=True):
            room = max_length - len(prompt)
            if room < 1:
                notes["prompt fills max_length"] += 1
                continue
            if chosen[:room] == rejected[:room]:
                notes["answers equal within max_length"] += 1
                continue
            notes["cut to max_length"] += len(chosen) > room or len(rejected) > room
            pairs.append(prompt, chosen[:room], rejected[:room], record.margin, record.source)
    _check(pairs, records, f"{name} none has answers that differ", max_length, f"{stage}.max_length")
    return pairs, +notes


def encode_prompts(
    tokenizer: ChatTokenizer, records: Sequence[Prompt], *, max_tokens: int
) -> tuple[PromptItems, Counter[str]]:
    """(prompts, what was dropped). Raises UserError where nothing is left."""
    items = PromptItems()
    for chunk in _chunks(records, "prompts"):
        encoded = tokenizer.encode_prompts([record.messages for record in chunk])
        for record, ids in zip(chunk, encoded, strict=True):
            if len(ids) > max_tokens:
                continue
            items.ids.append(ids)
            if record.row is not None:
                items.rows.append(record.row)
    _check(items.ids, records, "prompts none fits", max_tokens, "rollout.max_prompt_tokens")
    return items, +Counter({"prompt longer than max_prompt_tokens": len(records) - len(items.ids)})


def _chunks(records: Sequence[Record], what: str) -> Iterator[Sequence[Record]]:
    """So many at a time; says every few seconds how far it is."""
    said = time.monotonic()
    for start in range(0, len(records), CHUNK):
        if time.monotonic() - said >= SECONDS_A_LINE:
            said = time.monotonic()
            print(f"{start:,} of {len(records):,} {what} are tokenized", flush=True)
        yield records[start : start + CHUNK]


def _check(items: Sequence[object], records: Sequence[object], what: str, limit: int, key: str) -> None:
    if records and not items:
        raise UserError(f"Of {len(records)} {what} within {key}={limit} tokens: raise {key}.")
