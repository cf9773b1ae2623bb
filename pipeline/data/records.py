"""The records of data files (prompts, conversations, preferences), and the parsing of their messages and answers."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""A row of a data file: column name -> value."""

FP32_MAX = 3.4028234663852886e38
REASONING = "reasoning_content"
REASONING_KEYS = (REASONING, "reasoning", "thinking")


class Turn(NamedTuple):
    """What a chat template sees of a message besides its content: the role, and the fields as JSON."""

    role: str
    fields: str = ""

    def parsed(self) -> dict[str, Any]:
        """Return the fields as an object."""
        return dict(json.loads(self.fields)) if self.fields else {}


@dataclass(frozen=True)
class Message:
    """One turn. `role` is "system", "user", "assistant", or "tool" for the result of a call.

    fields: other fields that chat templates read, as JSON of an object: `tool_calls` of an answer, `name` and
    `tool_call_id` of a result, and in the first message `tools`, which the conversation may call. An empty `content`
    among them replaces that of the message.
    reasoning: what an answer says before its content
    """

    role: str
    content: str
    fields: str = ""
    reasoning: str = ""

    @property
    def turn(self) -> Turn:
        """The role and the fields. They contain that there is reasoning, and not its text."""
        turn = Turn(self.role, self.fields)
        return Turn(self.role, _json({**turn.parsed(), REASONING: True})) if self.reasoning else turn

    def to_row(self) -> Row:
        """Return the message as an object of a data file."""
        reasoning = {REASONING: self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **Turn(self.role, self.fields).parsed(), **reasoning}

    @property
    def text(self) -> str:
        """The content and the calls, for people and for texts that a tokenizer learns from."""
        calls = self.turn.parsed().get("tool_calls", [])
        lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        return "\n".join([self.content, *lines] if self.content else lines)


EMPTY_SYSTEM = Message("system", "")  # chat services write it if there is no system message


@dataclass(frozen=True)
class Prompt:
    """A conversation without the answer: its last message is not from the assistant.

    row: the row that the prompt was read from, if the caller needs it; ignored by equality and hash
    """

    messages: tuple[Message, ...]
    source: str
    row: Row | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Conversation:
    """A conversation for SFT. Its last message is from the assistant."""

    messages: tuple[Message, ...]
    source: str


@dataclass(frozen=True)
class Document:
    """A text without turns, for continued pre-training. Its only message has the role "text"."""

    messages: tuple[Message, ...]
    source: str


@dataclass(frozen=True)
class Preference:
    """A preferred and a rejected answer to one prompt. `margin`: strength of the preference (0: unknown)."""

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    source: str
    margin: float = 0.0


@dataclass(frozen=True)
class LabelledAnswer:
    """A conversation with a label: whether its last message, an answer, is desirable (KTO)."""

    messages: tuple[Message, ...]
    label: bool
    source: str


Record = Conversation | Document | LabelledAnswer | Preference | Prompt


def prompt_of(record: Record) -> tuple[Message, ...]:
    """Return every message before the answer of a record, or the text of a document."""
    if isinstance(record, Preference):
        return record.prompt
    return record.messages[:-1] if isinstance(record, Conversation | LabelledAnswer) else record.messages


CALL_ROLES = ("function_call", "tool_call")
CALL_KEYS = ("tool_calls", "function_call")
NAMES = {  # of each role, in data files
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", *CALL_ROLES),
    "tool": ("tool", "function", "ipython", "observation", "tool_response"),
}
ROLES = {name: role for role, names in NAMES.items() for name in names}
# A list of messages as text, in JSON or as Python writes it: the cell of a CSV file.
_MESSAGES = re.compile(
    r"""\s*\[\s*\{\s*(?=["'](?:role|content|from|value)["'])"""
    r""".*?["'](?:role|from)["']: ?["'](?:system|user|assistant|human|gpt)["'].*\}\s*\]\s*""",
    re.DOTALL,
)
NOT_TEXT = "a message with an image or another part that is not text"
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_HELPSTEER_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")  # the first question has no mark


class BadRow(Exception):
    """An unusable row. The message is the reason, which is equal for all rows with the same fault."""


class UnusedRow(Exception):
    """A usable row that the stage does not read. The message is the reason."""


def text_of(value: Any, what: str) -> str:
    """Return a text without surrounding white space. `what` names the text in the reason of a BadRow."""
    if not isinstance(value, str):
        raise BadRow(f"no {what}" if value is None else f"{what} is not a text")
    text = replace_surrogates(value).strip()
    if not text:
        raise BadRow(f"empty {what}")
    return text


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and tokenizers reject, by the replacement character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text  # itself, so that a record shares the memory of its row


def messages_of(value: Any) -> tuple[Message, ...]:
    """Parse a list of {"role", "content"} (or {"from", "value"}), or turns as text.

    Messages of one role are joined, and turns of the assistant before the first one of the user are left out.
    """
    value = _list_of(value)
    if isinstance(value, str) and value.lstrip().startswith("Human:"):
        return turns_of(value)
    if isinstance(value, (str, bytes)):
        raise BadRow("messages are not a list")
    if not isinstance(value, Sequence):
        raise BadRow("no messages" if value is None else "neither a text nor a list of messages")
    return in_order(_without_greeting([message_of(item) for item in value]))


def _without_greeting(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages without the turns of the assistant before the first turn of the user, if there is a user."""
    first = next((index for index, message in enumerate(messages) if message.role == "user"), 0)
    return [message for index, message in enumerate(messages) if index >= first or message.role != "assistant"]


def _list_of(value: Any) -> Any:
    """Return the list that a CSV cell contains as text; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer with thousands of digits
        raise BadRow("a list of messages that is not JSON (pandas: write to_json, not to_csv)") from error


def list_in(value: Any) -> Any:
    """Return the message list that a prompt or an answer contains as text; any other value unchanged."""
    return _list_of(value) if isinstance(value, str) and _MESSAGES.fullmatch(value) else value


def turns_of(text: str, what: str = "text") -> tuple[Message, ...]:
    """Parse "\\n\\nHuman: ...\\n\\nAssistant: ..." (the form of hh-rlhf). An empty last "Assistant:" is ignored."""
    text = replace_surrogates(text).strip()
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip():
        raise BadRow(f"{what} without Human: and Assistant: turns")
    turns = [(ROLES[name.lower()], content.strip()) for name, content in zip(parts[1::2], parts[2::2], strict=True)]
    if len(turns) > 1 and turns[-1] == ("assistant", ""):
        turns.pop()
    if any(not content for _, content in turns):
        raise BadRow("empty turn")
    return in_order([Message(role, content) for role, content in turns])


def question_of(value: Any) -> tuple[Message, ...]:
    """Parse a prompt: a question, turns as text, or messages. It ends with the user or with the result of a tool."""
    value = list_in(value)
    if isinstance(value, str) and value.lstrip().startswith("Human:") and value.rstrip().endswith("\n\nAssistant:"):
        messages = turns_of(value)
    elif value is None or isinstance(value, str):
        parts = ["user", *_HELPSTEER_TURN.split(text_of(value, "prompt"))]
        turns = zip(parts[::2], parts[1::2], strict=True)
        messages = in_order([Message(role.lower(), text_of(content, "turn")) for role, content in turns])
    else:
        messages = messages_of(value)
    if messages[-1].role not in ("user", "tool"):
        raise BadRow("prompt does not end with a user's turn")
    return messages


def answer_of(value: Any) -> tuple[Message, ...]:
    """Parse an answer: a text, a number, a message or a message list that ends with the assistant."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value) if math.isfinite(value) else None  # an empty cell of a column of numbers
    elif isinstance(value, Mapping):
        value = [value]
    value = list_in(value)
    if value is None or isinstance(value, str):
        return (Message("assistant", text_of(value, "answer")),)
    if not isinstance(value, Sequence):
        raise BadRow("an answer that is neither a text nor a list of messages")
    messages = [message_of(item) for item in value]
    if not messages or messages[-1].role != "assistant":
        raise BadRow("answer does not end with the assistant's turn")
    return tuple(messages)


def history_of(value: Any) -> tuple[Message, ...]:
    """Parse the turns before a prompt: a list of [question, answer], or of messages, also as JSON text."""
    value = _list_of(value.strip() if isinstance(value, str) else value) or []
    is_list = isinstance(value, list)
    if is_list and all(isinstance(each, Mapping) for each in value):
        return messages_of(value) if value else ()
    if not is_list or not all(isinstance(each, list) and len(each) == 2 for each in value):
        raise BadRow("history is neither a list of [question, answer] nor of messages (rename it if it is other text)")
    return tuple(message for question, answer in value for message in (*question_of(question), *answer_of(answer)))


def message_of(item: Any) -> Message:
    """Parse a message: {"role", "content"}, or {"from", "value"}, and calls or the name of a tool. Raises BadRow."""
    if not isinstance(item, Mapping):
        raise BadRow("a message is not an object")
    name = item.get("role", item.get("from"))
    name = name.lower() if isinstance(name, str) else ""
    role = ROLES.get(name)
    if role is None:
        shown = f"of the role {name[:20]!r}" if name else "without a role"
        raise BadRow(f"a message {shown} (known are system, user, assistant, tool)")
    content = item.get("content", item.get("value"))
    fields: dict[str, Any] = {}
    is_call = name in CALL_ROLES
    calls = content if is_call else next((item[key] for key in CALL_KEYS if item.get(key)), None)
    if role == "tool" or (role == "assistant" and (is_call or calls)):
        from pipeline.data import tool_calls  # for data with tools only

        if role == "tool":
            fields, content = tool_calls.result_fields(item), tool_calls.result_text(content)
        else:
            parsed = tool_calls.calls_of(calls)
            fields, content = {"tool_calls": parsed} if parsed else {}, None if is_call else content
    if isinstance(content, list):  # parts, as chat services write them
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRow(NOT_TEXT)
        content = "".join(map(str, parts))
    given = next((item[key] for key in REASONING_KEYS if isinstance(item.get(key), str)), "")
    reasoning = replace_surrogates(given).strip() if role == "assistant" else ""
    if content is None or (isinstance(content, str) and not content.strip()):
        if role == "system":
            return EMPTY_SYSTEM
        if fields or role == "tool":
            return Message(role, "", _json({"content": "", **fields}), reasoning)
    return Message(role, text_of(content, "answer" if role == "assistant" else "content"), _json(fields), reasoning)


def _json(fields: Mapping[str, Any]) -> str:
    return replace_surrogates(json.dumps(fields, ensure_ascii=False)) if fields else ""


def in_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join consecutive messages of one role, and check the order: optional system message, then user and assistant.

    Results of tools follow an answer with calls. An empty system message is left out.
    """
    joined: list[Message] = []
    for message in messages:
        if message == EMPTY_SYSTEM:
            continue
        if joined and joined[-1].role == message.role != "tool":
            joined[-1] = _join(joined[-1], message)
        else:
            joined.append(message)
    if not joined:
        raise BadRow("no messages")
    turns = joined[1:] if joined[0].role == "system" else joined
    if any(message.role == "system" for message in turns):
        raise BadRow("a system message after the start")
    if turns and turns[0].role == "assistant":
        raise BadRow("the assistant speaks first")
    for before, message in zip([None, *turns], turns, strict=False):
        if message.role == "tool" and (before is None or not (before.role == "tool" or _calls(before))):
            raise BadRow("the result of a tool without a call before it")
    return tuple(joined)


def _join(first: Message, second: Message) -> Message:
    content = "\n\n".join(message.content for message in (first, second) if message.content)
    calls = _calls(first) + _calls(second)
    fields = first.turn.parsed() | second.turn.parsed() | ({"tool_calls": calls} if calls else {})
    if content:
        fields.pop("content", None)
    fields.pop(REASONING, None)
    reasoning = "\n\n".join(message.reasoning for message in (first, second) if message.reasoning)
    return Message(first.role, content, _json(fields), reasoning)


def _calls(message: Message) -> list[Any]:
    return list(message.turn.parsed().get("tool_calls", []))
