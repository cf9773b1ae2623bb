"""Convert rows to records. The columns of a table determine its form (docs/reference/data.md lists the forms)."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pipeline.config.stages import STAGES
from pipeline.data.records import (
    FP32_MAX,
    NOT_TEXT,
    ROLES,
    BadRow,
    Conversation,
    Document,
    LabelledAnswer,
    Message,
    Preference,
    Prompt,
    Record,
    Row,
    UnusedRow,
    answer_of,
    history_of,
    in_order,
    list_in,
    messages_of,
    prompt_of,
    question_of,
    text_of,
    turns_of,
)
from pipeline.data.tool_calls import with_tools
from pipeline.errors import UserError

Form = Literal["preferences", "messages", "completions", "labelled", "prompts", "text"]

PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")  # the first that a row has
RENAME = 'To rename columns, write "data.sources=[{path: FILE, columns: {name in the file: name in zerochat}}]"'
ANSWER_COLUMNS = ("completion", "answer", "output", "response")
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
SYSTEM_COLUMNS = ("system", "system_prompt")
CONTEXT_COLUMNS = ("input", "context")  # of an instruction or a question
STAGES_BY_FORM: dict[Form, tuple[str, ...]] = {
    "preferences": ("sft", "reward", "ppo"),
    "messages": ("sft", "ppo"),
    "completions": ("sft", "ppo"),
    "labelled": ("sft", "ppo"),
    "prompts": ("ppo",),
    "text": ("sft",),
}
LABEL_COLUMN, TEXT_COLUMN = "label", "text"
IGNORED_LABELS = (LABEL_COLUMN, "labels", "kto_tag")  # LLaMA-Factory's name is the last one
OPENAI_COLUMNS = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
VOTE_COLUMNS = {"vote", "left", "right"}  # the chat page's arena writes these columns in addition to preferences
TREE_COLUMNS = {"parent_id", "role", "text"}  # the messages of OpenAssistant, which form trees
TOOL_COLUMNS = ("tools", "functions")
FORMS_TEXT = (
    "prompt + completion (or question + answer, or instruction + input + output); messages; "
    "prompt + chosen + rejected; chosen + rejected that begin with the same turns; prompt + completion + label; "
    "prompt alone; text alone"
)


def stages_of(form: Form, *, labels: bool) -> tuple[str, ...]:
    """Return the stages that read a form. `labels`: the preference stage learns from labels (dpo.loss=kto)."""
    return (*STAGES_BY_FORM[form], "reward") if labels and form == "labelled" else STAGES_BY_FORM[form]


def detect(columns: Collection[str], name: str = "the data") -> Form:
    """Return the form of a table from its columns.

    Raises UserError with the columns and the supported forms, also for a label that training would ignore.
    """
    form = _form(set(columns), name)
    labels = sorted(column for column in columns if column.strip().lower() in IGNORED_LABELS)
    if labels and form in ("messages", "completions", "text"):  # SFT imitates every row of these forms
        raise UserError(
            f"{name}: the column {labels[0]} would be ignored, so SFT would imitate answers that it may mark as bad. "
            f"Columns found: {', '.join(sorted(columns))}. If the column marks desirable answers, name it label, with "
            "the columns prompt + completion, or messages. If it has another meaning, rename it: "
            f'"data.sources=[{{path: FILE, columns: {{{labels[0]}: note}}}}]".'
        )
    return form


def _form(found: set[str], name: str) -> Form:
    if {"chosen", "rejected"} <= found or found >= VOTE_COLUMNS or found >= {"input", *OPENAI_COLUMNS}:
        return "preferences"
    if found & {"chosen", "rejected"}:
        raise UserError(
            f"{name}: preferences need a column chosen and a column rejected. Columns found: "
            f"{', '.join(sorted(found))}. {RENAME}."
        )
    has_answer = bool(found & set(ANSWER_COLUMNS))
    if LABEL_COLUMN in found and (found & set(MESSAGE_COLUMNS) or (found & set(PROMPT_COLUMNS) and has_answer)):
        return "labelled"
    if found & set(MESSAGE_COLUMNS):
        return "messages"
    if found & set(PROMPT_COLUMNS):
        return "completions" if has_answer else "prompts"
    if found >= TREE_COLUMNS:
        raise UserError(
            f"{name}: each row is one message (columns parent_id, role, text), so SFT would learn single messages. "
            'Follow parent_id and write one conversation per row: {"messages": [{"role": ..., "content": ...}, ...]}.'
        )
    if TEXT_COLUMN in found:
        return "text"
    raise UserError(
        f"{name}: the columns match no known form. Columns found: {', '.join(sorted(found)) or 'none'}. Names are in "
        f"lower case; in CSV they are in the first line. Known forms: {FORMS_TEXT}. {RENAME}."
    )


def parse_row(row: Row, form: Form, source: str) -> Record:
    """Return the record of a row in the type of its form.

    Raises BadRow for an unusable row, and UnusedRow for a row that no stage reads.
    """
    record = _PARSERS[form](row, source)
    messages = record.prompt if isinstance(record, Preference) else record.messages
    has_image = any(row.get(column) for column in ("image", "images"))
    if has_image and any("<image>" in message.content for message in messages):  # as LLaVA's data do
        raise BadRow(NOT_TEXT)
    return record


def for_stage(record: Record, stage: str, *, labels: bool) -> Record:
    """Convert a record to the type that the stage reads. The form must serve the stage.

    labels: dpo also reads labelled answers (LabelledAnswer), and sft leaves out the undesirable ones
    Raises BadRow or UnusedRow if the stage cannot use the record.
    """
    reads = STAGES[stage].reads
    if reads == "reward":
        assert isinstance(record, Preference) or (labels and isinstance(record, LabelledAnswer))
        return record
    if isinstance(record, Document):
        return record  # SFT learns its text; for other stages it is only held out
    if reads == "ppo":
        return record if isinstance(record, Prompt) else Prompt(prompt_of(record), record.source)
    if isinstance(record, Preference):
        return Conversation((*record.prompt, record.chosen), record.source)
    if isinstance(record, Prompt):
        raise BadRow("no assistant's turn")
    if isinstance(record, LabelledAnswer):
        if not record.label and labels:
            raise UnusedRow("label is false, for dpo")
        if not record.label:
            raise BadRow("label is false, and only method=dpo dpo=kto learns from undesirable answers")
        return Conversation(record.messages, record.source)
    return record


def _first(row: Row, names: tuple[str, ...]) -> Any:
    """Return the value of the first of these columns that the row has."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _with_columns(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return a conversation with the system message and the tools of other columns."""
    system = _first(row, SYSTEM_COLUMNS)
    if isinstance(system, str) and system.strip() and messages[0].role != "system":
        messages = (Message("system", text_of(system, "system message")), *messages)
    tools = next((row[name] for name in TOOL_COLUMNS if row.get(name)), None)
    return messages if tools is None else with_tools(messages, tools)


def _prompt_of(row: Row) -> tuple[Message, ...]:
    """Return the prompt of a row, after the turns of the column `history`.

    `input` or `context` follows an instruction or a question after an empty line.
    """
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column == "prompt" and _is_example(row["prompt"], row.get("instruction"), _first(row, ANSWER_COLUMNS)):
        column = "instruction"
    messages = question_of(row.get(column or ""))
    extra = _first(row, CONTEXT_COLUMNS)
    if column in ("instruction", "question") and isinstance(extra, str) and extra.strip():
        messages = (*messages[:-1], Message("user", f"{messages[-1].content}\n\n{text_of(extra, 'context')}"))
    if history := history_of(row.get("history")):
        messages = in_order(history + messages)
    return _with_columns(row, messages)


def _is_example(prompt: Any, instruction: Any, answer: Any) -> bool:
    """Return whether a prompt is the rendered text of instruction and answer, so that it would give the answer away."""
    parts = [part.strip() if isinstance(part, str) else "" for part in (prompt, instruction, answer)]
    return all(parts) and parts[1] in parts[0] and parts[0].endswith(parts[2])


def _prompt_row(row: Row, source: str) -> Record:
    return Prompt(_prompt_of(row), source)


def _completion_row(row: Row, source: str) -> Record:
    columns: tuple[str, ...] = ANSWER_COLUMNS
    if row.get("answer") is not None and row.get(LABEL_COLUMN) is None:  # a label belongs to the answer
        columns = ("completion", "solution", *columns)  # in data of mathematics, `answer` is the result of `solution`
    return Conversation(in_order(_prompt_of(row) + answer_of(_first(row, columns))), source)


def _labelled_row(row: Row, source: str) -> Record:
    label = _label(row.get(LABEL_COLUMN))
    record = _messages_row(row, source) if _first(row, MESSAGE_COLUMNS) is not None else _completion_row(row, source)
    if not isinstance(record, Conversation):
        raise BadRow("no assistant's turn")
    return LabelledAnswer(record.messages, label, source)


def _messages_row(row: Row, source: str) -> Record:
    """Return the conversation up to the last turn of the assistant, or a prompt if there is no such turn."""
    given = _first(row, MESSAGE_COLUMNS)
    if isinstance(given, list) and any(map(_is_unweighted_answer, given)):
        raise BadRow("an answer with weight 0, which SFT would imitate (remove the field, or end the row before it)")
    messages = _with_columns(row, messages_of(given))
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=None)
    if last is not None:
        return Conversation(messages[: last + 1], source)
    if messages[-1].role != "user":
        raise BadRow("no user's turn")
    return Prompt(messages, source)


def _is_unweighted_answer(message: Any) -> bool:
    """Return whether a message is an answer that OpenAI's fine-tuning leaves out of the loss."""
    is_message = isinstance(message, Mapping) and message.get("weight") == 0
    return is_message and ROLES.get(str(message.get("role", message.get("from"))).lower()) == "assistant"


def _text_row(row: Row, source: str) -> Record:
    return Document((Message("text", text_of(row.get(TEXT_COLUMN), "text")),), source)


def _preference_row(row: Row, source: str) -> Record:
    if set(row) >= VOTE_COLUMNS and row.get("chosen") is None and row.get("rejected") is None:
        raise UnusedRow("vote that prefers no answer")
    if set(row) >= {"input", *OPENAI_COLUMNS}:
        row = _openai_row(row)
    for side in ("chosen", "rejected"):
        if row.get(side) is None:
            raise BadRow(f"no {side}")
    prompt, chosen, rejected = _sides(row)
    if chosen == rejected:
        raise BadRow("chosen equals rejected")
    return Preference(prompt, chosen, rejected, source, _margin(row))


def _openai_row(row: Row) -> Row:
    """Return the columns of a row in the format of OpenAI's preference fine-tuning under our names."""
    given = row["input"] if isinstance(row["input"], Mapping) else {}
    answers = {ours: row[theirs] for theirs, ours in OPENAI_COLUMNS.items()}
    return {"prompt": given.get("messages"), "tools": given.get("tools")} | answers


def _sides(row: Row) -> tuple[tuple[Message, ...], Message, Message]:
    """Return prompt, chosen answer and rejected answer of a row with or without a prompt column."""
    start: tuple[Message, ...]
    prompt_column = _first(row, PROMPT_COLUMNS)
    if prompt_column is None and isinstance(row.get("chosen"), Mapping):  # one message each, after the turns
        chosen, rejected = answer_of(row.get("chosen")), answer_of(row.get("rejected"))
        start = question_of(_first(row, MESSAGE_COLUMNS))
    elif prompt_column is None:
        chosen, rejected = _dialogue(row.get("chosen"), "chosen"), _dialogue(row.get("rejected"), "rejected")
        start = ()
    else:
        chosen, rejected = answer_of(row.get("chosen")), answer_of(row.get("rejected"))
        # message lists may repeat the prompt (they begin with the user) or continue after it
        start = _prompt_of(row) if chosen[0].role == "assistant" else ()
    chosen, rejected = in_order(start + chosen), in_order(start + rejected)
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("chosen and rejected answer different prompts")
    return _with_columns(row, chosen[:-1]), chosen[-1], rejected[-1]


def _dialogue(value: Any, what: str) -> tuple[Message, ...]:
    """Return a conversation that ends with the answer, from Human:/Assistant: text or a message list."""
    value = list_in(value)
    if value is None or isinstance(value, str):
        messages = turns_of(text_of(value, what), f"no prompt (columns {', '.join(PROMPT_COLUMNS)}), and {what}")
    else:
        messages = messages_of(value)
    if messages[-1].role != "assistant":
        raise BadRow("empty answer" if isinstance(value, str) else "answer does not end with the assistant's turn")
    return messages


def _label(value: Any) -> bool:
    """Parse a label: true or false, 1 or 0, or these words as text."""
    labels = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if value is None:
        raise BadRow("no label")
    label = labels.get(str(value).strip().lower())
    if label is None:
        raise BadRow("label is neither true nor false (write true or false, or rename a column with another meaning)")
    return label


def _margin(row: Row) -> float:
    """Return the margin column, or the difference of the two scores, or 0."""
    margin = _number(row, "margin")
    if margin is not None:
        return margin
    chosen, rejected = _number(row, "score_chosen"), _number(row, "score_rejected")
    return chosen - rejected if chosen is not None and rejected is not None else 0.0


def _number(row: Row, column: str) -> float | None:
    """Return the number in a column, None for an empty cell. Raises BadRow for any value that fp32 does not have."""
    value = row.get(column)
    if value is None or value == "":  # an empty cell of CSV
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= FP32_MAX:
        raise BadRow(f"{column} is not a finite number")
    return number


_PARSERS: dict[Form, Callable[[Row, str], Record]] = {
    "preferences": _preference_row,
    "messages": _messages_row,
    "completions": _completion_row,
    "labelled": _labelled_row,
    "prompts": _prompt_row,
    "text": _text_row,
}
