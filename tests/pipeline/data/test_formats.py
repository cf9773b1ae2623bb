"""Rows of each format become records. Bad rows are counted, and refused above the limit."""

import json
import math
from typing import Any

import pytest

from pipeline.data.files import Table, table_of
from pipeline.data.formats import detect, stages_of
from pipeline.data.records import (
    Conversation,
    Document,
    LabelledAnswer,
    Message,
    Preference,
    Prompt,
)
from pipeline.errors import UserError
from tests.pipeline.data.templates import chat, to_records


def one(row: dict[str, Any], stage: str) -> Any:
    records, skipped = to_records(table_of("t", [row]), stage, "s", bad_row_limit=0.0)
    assert not skipped
    return records[0]


def pair(chosen: str, rejected: str, *prompt: str) -> Preference:
    return Preference(chat(*prompt), Message("assistant", chosen), Message("assistant", rejected), "s")


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (["prompt", "prompt_id", "messages"], "messages"),
        (["conversation", "language"], "messages"),
        (["problem", "answer"], "completions"),
        (["prompt", "chosen", "rejected", "messages", "score_chosen", "score_rejected"], "preferences"),
        (["question"], "prompts"),
        (["prompt", "completion", "label"], "labelled"),
        (["messages", "label"], "labelled"),
        (["prompt", "label"], "prompts"),
        (["prompt", "chosen", "rejected", "label"], "preferences"),
    ],
)
def test_columns_determine_the_format(columns: list[str], form: str) -> None:
    assert detect(columns) == form


@pytest.mark.parametrize(
    ("columns", "output"),
    [
        (["2 + 2?", "4"], r"Columns found: 2 \+ 2\?, 4\. Names are in lower case; in CSV they are in the first line"),
        (["txt", "label"], r"Columns found: label, txt.*prompt \+ completion.*columns: {"),
        (["prompt", "choosen", "rejected"], r"a column chosen and a column rejected\. Columns found: choosen, prompt"),
        # SFT would imitate the rows that the ignored column marks as bad
        (["text", "label"], r"the column label would be ignored.*columns: {label: note}"),
        (["messages", "Label"], r"the column Label would be ignored.*columns: {Label: note}"),
        (["prompt", "completion", "labels"], r"the column labels would be ignored.*columns: {labels: note}"),
        (["messages", "kto_tag"], r"the column kto_tag would be ignored.*columns: {kto_tag: note}"),
        (["question", "answer", " label"], r"the column  label would be ignored.*columns: { label: note}"),
        # OpenAssistant: the remedy for labels would train on single messages as documents
        (["message_id", "parent_id", "text", "role", "labels"], r"each row is one message .*Follow parent_id"),
    ],
)
def test_columns_without_a_form_are_refused_by_name(columns: list[str], output: str) -> None:
    with pytest.raises(UserError, match=rf"^rows\.csv: .*{output}"):
        detect(columns, "rows.csv")


def test_broken_lines_count_as_bad_rows() -> None:
    rows = [{"prompt": f"q {n}", "completion": "a"} for n in range(38)]
    broken = [(f"line {n}", "a line is not a JSON object") for n in (7, 9)]
    table = table_of("t", rows, broken=broken)
    records, skipped = to_records(table, "sft", "s", bad_row_limit=0.05)  # 2 of 40
    assert len(records) == 38 and skipped == {"a line is not a JSON object": 2}
    with pytest.raises(UserError, match=r"2 of 39 rows cannot .*: 2 x a line is not a JSON object \(first: line 7\)"):
        to_records(table_of("t", rows[:-1], broken=broken), "sft", "s", bad_row_limit=0.05)


def test_an_empty_list_of_tools_is_accepted() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": None}]
    assert one({"messages": turns, "tools": "[]"}, "sft").messages == chat("q", "a")
    turns[1]["tool_calls"] = "[]"  # of a CSV file
    assert one({"messages": turns, "tools": ""}, "sft").messages == chat("q", "a")


def test_texts_are_documents_for_sft_only() -> None:
    assert one({"id": 1, "text": " Once. "}, "sft") == Document((Message("text", "Once."),), "s")
    assert stages_of("text", labels=True) == ("sft",)


USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "g"), ("assistant", "b")))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": " a ", "completion": " b\n"}, chat("a", "b")),
        ({"question": "a", "answer": "b"}, chat("a", "b")),
        ({"question": "6 * 7?", "answer": 42}, chat("6 * 7?", "42")),
        ({"problem": "6 * 7?", "solution": "6 * 7 is 42.", "answer": "42"}, chat("6 * 7?", "6 * 7 is 42.")),
        ({"prompt": "a", "completion": "b", "solution": "s", "answer": "r"}, chat("a", "b")),
        ({"prompt": "Task: a\nAnswer: b ", "instruction": "a", "input": "x", "output": "b"}, chat("a\n\nx", "b")),
        ({"prompt": "Do a:", "instruction": "a", "output": "b"}, chat("Do a:", "b")),
        ({"prompt": "a \ud83d", "completion": "\udc00b \ud83d\ude00"}, chat("a \ufffd", "\ufffdb 😀")),
        ({"prompt": "Human: \ud83d\n\nAssistant:", "completion": "b"}, chat("\ufffd", "b")),
        ({"instruction": "a", "input": "x", "output": "b"}, chat("a\n\nx", "b")),
        ({"instruction": "a", "input": "", "output": "b"}, chat("a", "b")),
        (
            {"history": [["a", "b"]], "instruction": "c", "input": "x", "output": "d", "system": "s"},
            chat("a", "b", "c\n\nx", "d", system="s"),
        ),
        ({"history": [USER, GOOD], "prompt": "c", "completion": "d"}, chat("a", "g", "c", "d")),
        ({"history": [], "prompt": "a", "completion": "b"}, chat("a", "b")),
        ({"image": "a.jpg", "prompt": "a", "completion": "b"}, chat("a", "b")),
        ({"history": '[["a", "b"]]', "prompt": "c", "completion": "d"}, chat("a", "b", "c", "d")),
        ({"history": json.dumps([USER, GOOD]), "prompt": "c", "completion": "d"}, chat("a", "g", "c", "d")),
        ({"history": " ", "prompt": "a", "completion": "b"}, chat("a", "b")),
        ({"prompt": "[{'role': 'user', 'content': 'a'}]", "prompt_id": "1", "messages": [USER, GOOD]}, chat("a", "g")),
        ({"instruction": "a", "context": "x", "response": "b"}, chat("a\n\nx", "b")),
        ({"question": "a", "context": "x", "answer": "b"}, chat("a\n\nx", "b")),
        ({"prompt": "a", "context": "x", "completion": "b"}, chat("a", "b")),
        ({"input": "a", "context": "x", "output": "b"}, chat("a", "b")),
        ({"query": "a", "input": "x", "response": "b"}, chat("a", "b")),
        ({"system": "s", "prompt": "a", "completion": "b"}, chat("a", "b", system="s")),
        ({"system_prompt": "s", "question": "a", "response": "b"}, chat("a", "b", system="s")),
        ({"prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", "response": " d"}, chat(*"abcd")),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            chat("a", "b"),
        ),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, chat("a", "b")),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, chat("a", "b")),
        ({"messages": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"}, chat(*"abcd")),
        (
            {"prompt": "a\n\n<extra_id_1>Assistant\nb\n\n<extra_id_1>User\nc", "response": "d", "helpfulness": 4},
            chat(*"abcd"),
        ),
        ({"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'}, chat("a", "b")),
        ({"messages": [{"role": "system", "content": " "}, USER, GOOD]}, chat("a", "g")),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "a"}, "b"]}, GOOD]}, chat("ab", "g")),
        ({"messages": [{**USER, "weight": 0}, {**GOOD, "weight": 1}]}, chat("a", "g")),
        (
            {"system": "s", "prompt": [{"role": "system", "content": None}, USER], "answer": "b"},
            chat("a", "b", system="s"),
        ),
    ],
)
def test_conversations(row: dict[str, Any], expected: tuple[Message, ...]) -> None:
    assert one(row, "sft") == Conversation(expected, "s")
    assert one(row, "ppo") == Prompt(expected[:-1], "s")


@pytest.mark.parametrize("answer", ['[{"role": "admin"}]', "[1] a role: 'user'", '[{"from": "A", "to": "user"}]'])
def test_an_answer_in_brackets_stays_text(answer: str) -> None:
    assert one({"prompt": "q", "completion": answer}, "sft").messages == chat("q", answer)


def test_messages_after_the_last_answer_are_left_out() -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert one({"messages": turns}, "sft") == Conversation(chat("user", "assistant"), "s")
    assert one({"messages": turns[2:]}, "ppo") == Prompt(chat("user"), "s")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "g", "rejected": "b"},
        {"prompt": "Human: a\n\nAssistant:", "response": "g", "chosen": " g", "rejected": " b"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": json.dumps([USER]), "chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
        {"chosen": json.dumps([USER, GOOD], indent=1), "rejected": json.dumps([USER, BAD])},
        {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "g"}, "rejected": BAD},
        {"chosen": "\n\nHuman: a\n\nAssistant: g", "rejected": "\n\nHuman: a\n\nAssistant: b"},
        {"input": {"messages": [USER], "tools": []}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    ],
)
def test_preferences(row: dict[str, Any]) -> None:
    assert one(row, "reward") == pair("g", "b", "a")
    assert one(row, "sft") == Conversation(chat("a", "g"), "s")
    assert one(row, "ppo") == Prompt(chat("a"), "s")


def test_shared_turns_are_the_prompt() -> None:
    start = "\n\nHuman: a\n\nAssistant: b has\n\ntwo parts\n\nHuman: c: Assistant: d\n\nAssistant:"
    record = one({"chosen": start + " good", "rejected": start + " bad"}, "reward")
    assert record == pair("good", "bad", "a", "b has\n\ntwo parts", "c: Assistant: d")


@pytest.mark.parametrize(
    ("extra", "margin"),
    [
        ({}, 0.0),
        ({"margin": 1.5}, 1.5),
        ({"margin": "2"}, 2.0),
        ({"score_chosen": 8.5, "score_rejected": 6.0}, 2.5),
        ({"score_chosen": 8.5, "score_rejected": None}, 0.0),
        ({"margin": None}, 0.0),
        ({"score_chosen": "", "score_rejected": ""}, 0.0),  # empty cells of CSV
        ({"margin": "", "score_chosen": "2", "score_rejected": "0.5"}, 1.5),
    ],
)
def test_margins(extra: dict[str, Any], margin: float) -> None:
    assert one({"prompt": "a", "chosen": "g", "rejected": "b"} | extra, "reward").margin == margin


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "  "}, "empty answer"),
        ({"prompt": "a", "completion": None}, "no answer"),
        ({"prompt": "", "completion": "b"}, "empty prompt"),
        ({"prompt": "a", "completion": True}, "neither a text nor a list of messages"),
        ({"prompt": "a", "completion": float("nan")}, "no answer"),
        ({"conversations": [USER, GOOD], "chosen": GOOD, "rejected": BAD}, "prompt does not end with a user's turn"),
        ({"prompt": "a", "chosen": "g ", "rejected": "g"}, "chosen equals rejected"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "empty answer"),
        ({"prompt": "a", "chosen": "g", "rejected": "b", "margin": "large"}, "margin is not a finite number"),
        ({"prompt": "a", "chosen": "g", "rejected": "b", "margin": math.nan}, "margin is not a finite number"),
        ({"prompt": "a", "chosen": "g", "rejected": "b", "margin": True}, "margin is not a finite number"),
        ({"prompt": "a", "chosen": "g", "rejected": "b", "margin": 1e39}, "margin is not a finite number"),
        ({"prompt": "a", "chosen": "g", "rejected": "b", "margin": 10**400}, "margin is not a finite number"),
        (
            {"prompt": "a", "chosen": "g", "rejected": "b", "score_chosen": 1, "score_rejected": [2]},
            "score_rejected is not a finite number",
        ),
        ({"prompt": "a", "rejected": "b", "chosen": None}, "no chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "no rejected"),
        ({"chosen": "g", "rejected": "b"}, "no prompt (columns prompt, question, instruct"),
        ({"chosen": "Once\n\nHuman: a\n\nAssistant: g", "rejected": "Human: a\n\nAssistant: b"}, "without Human:"),
        ({"chosen": "Human: a\n\nAssistant: g", "rejected": "Human: x\n\nAssistant: b"}, "different prompts"),
        ({"chosen": "Human: a\n\nAssistant:", "rejected": "Human: a\n\nAssistant: b"}, "empty answer"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant's turn"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "a message of the role 'wizard' (known are system, user"),
        ({"messages": [{"content": "a"}]}, "a message without a role"),
        ({"messages": [USER, {**GOOD, "weight": 0}, USER, {**GOOD, "weight": 1}]}, "an answer with weight 0"),
        ({"messages": [{"role": "user", "content": " "}, GOOD]}, "empty content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "speaks first"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty answer"),
        ({"messages": [USER, {"role": "system", "content": "s"}, GOOD]}, "a system message after the start"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, GOOD]}, "a message with an image"),
        ({"messages": "hello"}, "messages are not a list"),
        ({"prompt": "a\n<extra_id_1>Assistant\nb", "response": "c"}, "prompt does not end with a user's turn"),
        (
            {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\na"}, GOOD]},
            "a message with an image",
        ),
        ({"prompt": "q", "completion": "a", "history": ["x"]}, "history is neither a list of [question, answer]"),
        ({"prompt": "q", "completion": "a", "history": "a text"}, "nor of messages (rename it if it is other text)"),
        ({"prompt": "q", "completion": "a", "history": 7}, "history is neither a list of [question, answer]"),
        ({"prompt": "q", "completion": "a", "history": "[['a', 'b']]"}, "a list of messages that is not JSON"),
        (
            {"prompt": "a", "chosen": str([USER, GOOD]), "rejected": str([USER, BAD])},
            "a list of messages that is not JSON",
        ),
        (
            {"prompt": "a", "completion": "[{'content': '{it}', 'role': 'user'}\n {...}]"},
            "a list of messages that is not",
        ),
        ({"prompt": 7, "completion": "hello"}, "neither a text nor a list of messages"),
        ({"prompt": "q", "answer": "a", "label": "good"}, "write true or false"),
        ({"prompt": "q", "answer": "a", "label": 2}, "label is neither true nor false"),
    ],
)
def test_bad_rows_are_counted_by_reason(row: dict[str, Any], reason: str) -> None:
    stage = "reward" if "chosen" in row else "sft"
    records, skipped = to_records(Table("t", [row], frozenset(row), [1]), stage, "s", bad_row_limit=1.0)
    assert not records
    (actual,) = skipped
    assert reason in actual


def test_too_many_bad_rows_are_refused_with_counts_and_places() -> None:
    good = {"prompt": "a", "chosen": "g", "rejected": "b"}
    rows = [good] * 94 + [good | {"chosen": "b"}] * 4 + [good | {"chosen": ""}] * 2
    assert to_records(table_of("t", rows), "reward", "s", bad_row_limit=0.06)[1].total() == 6
    output = r"t: 6 of 100 rows.*4 x chosen equals rejected \(first: row 95\), 2 x empty answer \(first: row 99\)"
    with pytest.raises(UserError, match=output + r".*data\.bad_row_limit=0\.05"):
        to_records(table_of("t", rows), "reward", "s", bad_row_limit=0.05)


def test_a_record_shares_the_texts_of_its_row() -> None:
    row = {"prompt": "Why is the sky blue? \u2014 asks nobody", "chosen": "Rayleigh scattering", "rejected": "Paint"}
    (record,), _ = to_records(table_of("a", [row]), "reward", "a", 0.0)
    assert isinstance(record, Preference)
    assert record.prompt[0].content is row["prompt"]
    assert record.chosen.content is row["chosen"] and record.rejected.content is row["rejected"]


def test_columns_of_nulls_are_ignored() -> None:
    row = {"prompt": "a", "completion": "b", "chosen": None, "rejected": None, "messages": None}
    assert len(to_records(table_of("t", [row]), "sft", "s", bad_row_limit=0.0)[0]) == 1


HELLO, SYSTEM = {"from": "gpt", "value": "Hello!"}, {"from": "system", "value": "s"}
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "g"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [HELLO, HUMAN, GPT]}, chat("a", "g")),
        ({"conversations": [SYSTEM, HELLO, HELLO, HUMAN, GPT]}, chat("a", "g", system="s")),
        ({"messages": json.dumps([HELLO, HUMAN, GPT])}, chat("a", "g")),
        ({"prompt": [HELLO, HUMAN], "chosen": [GPT], "rejected": [BAD]}, chat("a", "g")),
        ({"chosen": [HELLO, HUMAN, GPT], "rejected": [HELLO, HUMAN, BAD]}, chat("a", "g")),
    ],
)
def test_a_greeting_of_the_assistant_is_removed(row: dict[str, Any], expected: tuple[Message, ...]) -> None:
    assert one(row, "sft") == Conversation(expected, "s")


def test_a_label_belongs_to_the_answer_and_not_to_a_solution() -> None:
    table = table_of("t", [{"problem": "q", "solution": "s", "answer": "a", "label": False}])
    read, _ = to_records(table, "dpo", "s", bad_row_limit=0.0, labels=True)
    assert read == [LabelledAnswer(chat("q", "a"), False, "s")]


def test_labelled_answers_for_each_stage() -> None:
    """SFT trains on desirable answers only. Others are refused unless the preference stage uses them."""
    texts = ["true", False, 1, "0"]
    rows = [{"prompt": "q", "completion": f"a {i}", "label": label} for i, label in enumerate(texts)]
    desirable = [Conversation(chat("q", f"a {i}"), "s") for i in (0, 2)]
    table = table_of("t", rows)
    read, _ = to_records(table, "dpo", "s", bad_row_limit=0.0, labels=True)
    assert read == [LabelledAnswer(chat("q", f"a {i}"), i % 2 == 0, "s") for i in range(4)]
    sft, skipped = to_records(table, "sft", "s", bad_row_limit=0.0, labels=True)
    assert sft == desirable and skipped == {"label is false, for dpo": 2}
    with pytest.raises(UserError, match=r"2 of 4 rows .* for sft: 2 x label is false, and only method=dpo dpo=kto"):
        to_records(table, "sft", "s", bad_row_limit=0.49)
    assert to_records(table, "sft", "s", bad_row_limit=0.5)[0] == desirable
    assert to_records(table, "ppo", "s", bad_row_limit=0.0)[0] == [Prompt(chat("q"), "s")] * 4


@pytest.mark.parametrize("row", [{"system": "cut \ud83d", "prompt": "q"}, {"instruction": "q", "input": "cut \ud83d"}])
def test_lone_surrogates_in_system_messages_and_contexts_are_replaced(row: dict[str, Any]) -> None:
    """Tokenizers refuse them. A text that was cut inside an emoji ends with one."""
    text = "\n".join(message.content for message in one({**row, "output": "a"}, "sft").messages)
    assert "cut \ufffd" in text and text.encode()


def test_consecutive_messages_of_one_role_are_joined_in_every_form() -> None:
    def said(role: str, *texts: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for text in texts]

    two, other = said("assistant", "a", "b"), said("assistant", "c")
    assert one({"prompt": "q", "completion": two}, "sft").messages == chat("q", "a\n\nb")
    assert one({"prompt": "q", "completion": said("user", "r") + other}, "sft").messages == chat("q\n\nr", "c")
    assert one({"prompt": "q", "chosen": two, "rejected": other}, "reward") == pair("a\n\nb", "c", "q")
    asked = said("user", "q", "r")
    record = one({"prompt": "q", "chosen": asked + two, "rejected": asked + other}, "reward")
    assert record == pair("a\n\nb", "c", "q\n\nr")
    text = {"chosen": "Human: q\n\nHuman: r\n\nAssistant: a", "rejected": "Human: q\n\nHuman: r\n\nAssistant: c"}
    assert one(text, "reward") == pair("a", "c", "q\n\nr")
