"""Tokenize records and enforce a length limit.

| record | longer than the limit |
| --- | --- |
| conversation | truncated on the right; dropped if no target token remains |
| document | divided into rows of at most the limit |
| preference | answers are truncated (without an end token); dropped if no answer token fits or both are equal |
| labelled answer | truncated (without an end token); dropped if no answer token fits |
| prompt | dropped |

Token ids are stored in arrays: 4 bytes for each id, where a list of Python numbers takes up to 36.
"""

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.data.records import Conversation, Document, LabelledAnswer, Preference, Prompt, Row
from pipeline.data.sources import first_turn
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Record = TypeVar("Record")
CHUNK = 2048  # records that are lists of ids at a time
SECONDS_PER_LINE = 10.0
ADDED = "earlier answers as examples of their own"  # a note about rows that are neither cut nor dropped


@dataclass(frozen=True, eq=False, slots=True)
class TokenItem:
    """A conversation. ids (T,); counts (T,): True for the tokens of the loss."""

    ids: Ids
    counts: Flags


@dataclass(frozen=True, eq=False, slots=True)
class PairItem:
    """A pair. chosen (T1,) and rejected (T2,): ids of prompt and answer; prompt: number of tokens of the prompt.

    conversation: pairs with equal values belong to one conversation (they have the same first turn); None if unknown
    """

    chosen: Ids
    rejected: Ids
    margin: float
    source: str
    prompt: int
    conversation: bytes | None = None


@dataclass(frozen=True, eq=False, slots=True)
class LabelledItem:
    """An answer with a label. ids (T,): prompt and answer; prompt: number of tokens of the prompt."""

    ids: Ids
    prompt: int
    label: bool


@dataclass(frozen=True, eq=False, slots=True)
class PromptItem:
    """A prompt with its generation prompt, and its data row if the record has it."""

    ids: "array[int]"
    row: Row | None = None


def encoder(config: "RunConfig", stage: str, tokenizer: ChatTokenizer) -> Callable[..., tuple[Any, Counter[str]]]:
    """Return the function of this file that encodes the records of a stage: records -> (examples, notes)."""
    length = getattr(config, stage).max_length
    if stage == "sft":
        return partial(encode_conversations, tokenizer, max_length=length, loss_on=config.sft.loss_on)
    if stage == "ppo":
        rows = config.ppo.reward_function is not None
        return partial(encode_prompts, tokenizer, max_tokens=config.rollout.max_prompt_tokens, rows=rows)
    if stage == "dpo" and not config.dpo.reads_pairs:
        return partial(encode_labelled, tokenizer, max_length=length)
    return partial(encode_preferences, tokenizer, max_length=length, stage=stage)


def encode_conversations(
    tokenizer: ChatTokenizer,
    records: Sequence[Conversation | Document],
    *,
    max_length: int,
    loss_on: str = "assistant",
) -> tuple[list[TokenItem], Counter[str]]:
    """Return the conversations and documents, and the numbers of cut and dropped records by reason.

    loss_on: "assistant" for answers and their end tokens, "all" for every token; documents train every token
    Raises UserError if no record is left.
    """
    notes: Counter[str] = Counter()
    items: list[TokenItem] = []
    for chunk in _chunks(records):
        documents = [record.messages[0].content for record in chunk if isinstance(record, Document)]
        for ids in tokenizer.encode_documents(documents):
            notes["documents divided at max_length"] += len(ids) > max_length
            for start in range(0, len(ids), max_length):
                part = ids[start : start + max_length]
                if len(part) > 1:  # the loss begins with the second token
                    items.append(TokenItem(_ids(part), np.ones(len(part), np.bool_)))
        conversations = [record.messages for record in chunk if not isinstance(record, Document)]
        rows = tokenizer.encode_conversations(conversations, divide=loss_on == "assistant")
        notes[ADDED] += len(rows) - len(conversations)
        for ids, answers in rows:
            counts = answers[:max_length] if loss_on == "assistant" else [True] * min(len(ids), max_length)
            if not any(counts[1:]):
                notes["no answer within max_length"] += 1
                continue
            notes["cut to max_length"] += len(ids) > max_length
            items.append(TokenItem(_ids(ids[:max_length]), np.array(counts, np.bool_)))
    _check(items, records, "records has an answer token", max_length, "sft.max_length")
    return items, +notes


def encode_preferences(
    tokenizer: ChatTokenizer,
    records: Sequence[Preference],
    *,
    max_length: int,
    stage: str = "reward",
) -> tuple[list[PairItem], Counter[str]]:
    """Return the pairs, and the numbers of cut and dropped records by reason.

    stage: the stage whose key sets `max_length`
    Raises UserError if no record is left.
    """
    notes: Counter[str] = Counter()
    pairs: list[PairItem] = []
    for chunk in _chunks(records):
        prompts = tokenizer.encode_prompts([record.prompt for record in chunk])
        sides = [(*record.prompt, answer) for record in chunk for answer in (record.chosen, record.rejected)]
        answers = tokenizer.encode_last_answers(sides)
        for record, prompt, chosen, rejected in zip(chunk, prompts, answers[::2], answers[1::2], strict=True):
            limit = max_length - len(prompt)
            if limit < 1:
                notes["prompt fills max_length"] += 1
                continue
            if chosen[:limit] == rejected[:limit]:
                notes["answers equal within max_length"] += 1
                continue
            notes["cut to max_length"] += len(chosen) > limit or len(rejected) > limit
            first, second = _ids(prompt + chosen[:limit]), _ids(prompt + rejected[:limit])
            conversation = first_turn(record)[:8]
            pairs.append(PairItem(first, second, record.margin, record.source, len(prompt), conversation))
    _check(pairs, records, "records has answers that differ", max_length, f"{stage}.max_length")
    return pairs, +notes


def labelled_answers(records: Sequence[Preference | LabelledAnswer]) -> list[LabelledAnswer]:
    """Return the answers with labels. A pair becomes a desirable and an undesirable answer."""
    answers = []
    for record in records:
        if isinstance(record, LabelledAnswer):
            answers.append(record)
            continue
        for answer, label in ((record.chosen, True), (record.rejected, False)):
            answers.append(LabelledAnswer((*record.prompt, answer), label, record.source))
    return answers


def encode_labelled(
    tokenizer: ChatTokenizer, records: Sequence[LabelledAnswer], *, max_length: int
) -> tuple[list[LabelledItem], Counter[str]]:
    """Return the answers with labels, and the numbers of cut and dropped records by reason.

    Raises UserError if no record is left.
    """
    notes: Counter[str] = Counter()
    items: list[LabelledItem] = []
    for chunk in _chunks(records):
        prompts = tokenizer.encode_prompts([record.messages[:-1] for record in chunk])
        answers = tokenizer.encode_last_answers([record.messages for record in chunk])
        for record, prompt, answer in zip(chunk, prompts, answers, strict=True):
            limit = max_length - len(prompt)
            if limit < 1:
                notes["prompt fills max_length"] += 1
                continue
            notes["cut to max_length"] += len(answer) > limit
            items.append(LabelledItem(_ids(prompt + answer[:limit]), len(prompt), record.label))
    _check(items, records, "records has an answer token", max_length, "dpo.max_length")
    return items, +notes


def encode_prompts(
    tokenizer: ChatTokenizer, records: Sequence[Prompt], *, max_tokens: int, rows: bool = False
) -> tuple[list[PromptItem], Counter[str]]:
    """Return the prompts, and the number of dropped records by reason. Raises UserError if no record is left.

    rows: the prompts have their data rows
    """
    items, shortest = list[PromptItem](), math.inf
    for chunk in _chunks(records):
        encoded = tokenizer.encode_prompts([record.messages for record in chunk])
        shortest = min(shortest, *map(len, encoded))
        for record, ids in zip(chunk, encoded, strict=True):
            if len(ids) <= max_tokens:
                items.append(PromptItem(array("i", ids), record.row if rows else None))
    what = f"records fits (the shortest has {shortest} tokens)"
    _check(items, records, what, max_tokens, "rollout.max_prompt_tokens")
    return items, +Counter({"prompt longer than max_prompt_tokens": len(records) - len(items)})


def _ids(row: Sequence[int]) -> Ids:
    return np.array(row, np.int32)


def _chunks(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Yield chunks of records, and print the progress every few seconds."""
    printed = time.monotonic()
    for start in range(0, len(records), CHUNK):
        if time.monotonic() - printed >= SECONDS_PER_LINE:
            printed = time.monotonic()
            print(f"{start:,} of {len(records):,} records tokenized", flush=True)
        yield records[start : start + CHUNK]


def _check(items: Sequence[object], records: Sequence[object], what: str, limit: int, key: str) -> None:
    if records and not items:
        raise UserError(f"None of {len(records)} {what} within {key}={limit} tokens: raise {key}.")
