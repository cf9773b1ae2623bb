"""Records become token sequences that fit: what is too long is cut, or dropped where a cut makes no sense.

| record | longer than max_length |
| --- | --- |
| conversation | cut from the right; dropped if no token that counts is left |
| preference | answers are cut, without an end token then; dropped if the prompt leaves no room, or both became equal |
| prompt | dropped |
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.data.records import Conversation, Message, Preference, Prompt, Row
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenItem:
    """ids (T,); counts (T,): True where the loss counts this token."""

    ids: Ids
    counts: Flags


@dataclass(frozen=True, eq=False)
class PairItem:
    """chosen (T1,) and rejected (T2,): prompt and answer; margin in the labeller's unit."""

    chosen: Ids
    rejected: Ids
    margin: float
    source: str


@dataclass(frozen=True, eq=False)
class PromptItem:
    """ids (P,), generation prompt included; the data's row where the record kept it."""

    ids: Ids
    messages: tuple[Message, ...]
    source: str
    row: Row | None = None


def encode_conversations(
    tokenizer: ChatTokenizer,
    records: Sequence[Conversation],
    *,
    max_length: int,
    loss_on: str = "assistant",
    name: str = "conversations",
) -> tuple[list[TokenItem], Counter[str]]:
    """(items, what was cut or dropped). `loss_on`: "assistant" counts answers and their ends, "all" every token.

    Raises UserError where nothing is left; `name` is what it calls the records.
    """
    notes: Counter[str] = Counter()
    items = []
    for ids, counts in tokenizer.encode_conversations([record.messages for record in records]):
        if len(ids) > max_length:
            notes["cut to max_length"] += 1
        item = TokenItem(_ids(ids[:max_length]), np.array(counts[:max_length], dtype=np.bool_))
        if loss_on == "all":
            item = TokenItem(item.ids, np.ones(len(item.ids), dtype=np.bool_))
        if not item.counts[1:].any():
            notes["cut to max_length"] -= 1
            notes["no answer within max_length"] += 1
            continue
        items.append(item)
    _check(items, records, f"{name} none reaches its answer", max_length, "sft.max_length")
    return items, +notes


def encode_preferences(
    tokenizer: ChatTokenizer, records: Sequence[Preference], *, max_length: int, name: str = "pairs"
) -> tuple[list[PairItem], Counter[str]]:
    """(pairs, what was cut or dropped). Raises UserError where nothing is left; `name` is what it calls the records."""
    notes: Counter[str] = Counter()
    prompts = tokenizer.encode_prompts([record.prompt for record in records])
    answers = tokenizer.encode_answers([text for record in records for text in (record.chosen, record.rejected)])
    pairs = []
    for record, prompt, chosen, rejected in zip(records, prompts, answers[::2], answers[1::2], strict=True):
        room = max_length - len(prompt)
        if room < 1:
            notes["prompt fills max_length"] += 1
            continue
        if chosen[:room] == rejected[:room]:
            notes["answers equal within max_length"] += 1
            continue
        notes["cut to max_length"] += len(chosen) > room or len(rejected) > room
        pairs.append(
            PairItem(_ids(prompt + chosen[:room]), _ids(prompt + rejected[:room]), record.margin, record.source)
        )
    _check(pairs, records, f"{name} none has answers that differ", max_length, "reward.max_length")
    return pairs, +notes


def encode_prompts(
    tokenizer: ChatTokenizer, records: Sequence[Prompt], *, max_tokens: int
) -> tuple[list[PromptItem], Counter[str]]:
    """(prompts, what was dropped). Raises UserError where nothing is left."""
    encoded = tokenizer.encode_prompts([record.messages for record in records])
    items = [
        PromptItem(_ids(ids), record.messages, record.source, record.row)
        for record, ids in zip(records, encoded, strict=True)
        if len(ids) <= max_tokens
    ]
    _check(items, records, "prompts none fits", max_tokens, "rollout.max_prompt_tokens")
    return items, +Counter({"prompt longer than max_prompt_tokens": len(records) - len(items)})


def _ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def _check(items: Sequence[object], records: Sequence[object], what: str, limit: int, key: str) -> None:
    if records and not items:
        raise UserError(f"Of {len(records)} {what} within {key}={limit} tokens: raise {key}.")
