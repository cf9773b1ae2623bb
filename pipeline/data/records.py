"""The records of data files (prompts, conversations, preferences), and the parsing of their messages.

Messages are parsed from message lists and from "Human: ... Assistant: ..." text.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""A row of a data file: column name -> value."""


@dataclass(frozen=True)
class Message:
    """One turn. `role` is "system", "user" or "assistant"."""

    role: str
    content: str


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

    def prompt(self) -> Prompt:
        """Return the conversation without its last answer."""
        return Prompt(self.messages[:-1], self.source)


@dataclass(frozen=True)
class Document:
    """A text without turns, for continued pre-training. Its only message has the role "text"."""

    messages: tuple[Message, ...]
    source: str


@dataclass(frozen=True)
class Preference:
    """A preferred and a rejected answer to one prompt. `margin`: strength of the preference (0: unknown)."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str
    margin: float = 0.0


@dataclass(frozen=True)
class LabelledAnswer:
    """A conversation with a label: whether its last message, an answer, is desirable (KTO)."""

    messages: tuple[Message, ...]
    label: bool
    source: str


def labelled_answers(records: Sequence[Preference | LabelledAnswer]) -> list[LabelledAnswer]:
    """Return the answers with labels. A pair becomes a desirable and an undesirable answer."""
    answers = []
    for record in records:
        if isinstance(record, LabelledAnswer):
            answers.append(record)
            continue
        for text, label in ((record.chosen, True), (record.rejected, False)):
            answers.append(LabelledAnswer((*record.prompt, Message("assistant", text)), label, record.source))
    return answers


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = {"tool", "function", "ipython", "observation", "tool_call", "tool_response", "function_call"}
TOOL_KEYS = ("tool_calls", "function_call")
TOOLS = (
    "tool calls, which zerochat does not train on (remove these rows, or skip them with a higher data.bad_row_limit)"
)
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


class BadRow(Exception):
    """An unusable row. The message is the reason, which is equal for all rows with the same fault."""


class AssistantFirst(BadRow):
    """A conversation that begins with the assistant, as conversations with a greeting do."""


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
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def messages_of(value: Any) -> tuple[Message, ...]:
    """Parse a list of {"role", "content"} (or {"from", "value"}). Consecutive messages of one role are joined."""
    value = _list_of(value)
    if isinstance(value, (str, bytes)):
        raise BadRow("messages are not a list")
    if not isinstance(value, Sequence):
        raise BadRow("no messages" if value is None else "neither a text nor a list of messages")
    if not value:
        raise BadRow("no messages")
    return in_order([_message(item) for item in value])


def without_greeting(value: Any) -> Any:
    """Return a message list without the turns of the assistant before the first turn of the user.

    A value that is no message list, or has no turn of the user, is returned unchanged.
    """
    items = _list_of(value)
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        return value
    messages = [_message(item) for item in items]
    first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if first is None:
        return value
    before = [item for item, message in zip(items, messages[:first], strict=False) if message.role == "system"]
    return [*before, *items[first:]]


def _list_of(value: Any) -> Any:
    """Return the list that a CSV cell contains as text; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer with thousands of digits
        raise BadRow("messages are not a list") from error


def looks_like_turns(text: str) -> bool:
    """Return whether a prompt is a conversation as text: it starts with "Human:" and ends with "Assistant:"."""
    text = text.strip()
    return text.startswith("Human:") and text.endswith("\n\nAssistant:")


def turns_of(text: str) -> tuple[Message, ...]:
    """Parse "\\n\\nHuman: ...\\n\\nAssistant: ..." (the form of hh-rlhf). An empty last "Assistant:" is ignored."""
    text = replace_surrogates(text).strip()
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip():
        raise BadRow("text without Human: and Assistant: turns")
    turns = [(ROLES[name.lower()], content.strip()) for name, content in zip(parts[1::2], parts[2::2], strict=True)]
    if len(turns) > 1 and turns[-1] == ("assistant", ""):
        turns.pop()
    if any(not content for _, content in turns):
        raise BadRow("empty turn")
    return in_order([Message(role, content) for role, content in turns])


def question_of(value: Any) -> tuple[Message, ...]:
    """Parse a prompt: a question, a conversation as text, or a message list. It ends with the turn of the user."""
    if isinstance(value, str) and looks_like_turns(value):
        messages = turns_of(value)
    elif value is None or isinstance(value, str):
        messages = (Message("user", text_of(value, "prompt")),)
    else:
        messages = messages_of(value)
    if messages[-1].role != "user":
        raise BadRow("prompt does not end with a user's turn")
    return messages


def answer_of(value: Any) -> tuple[Message, ...]:
    """Parse an answer: a text, a number, a message or a message list that ends with the assistant."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value) if math.isfinite(value) else None  # an empty cell of a column of numbers
    elif isinstance(value, Mapping):
        value = [value]
    if value is None or isinstance(value, str):
        return (Message("assistant", text_of(value, "answer")),)
    if not isinstance(value, Sequence):
        raise BadRow("an answer that is neither a text nor a list of messages")
    messages = [_message(item) for item in value]
    if not messages or messages[-1].role != "assistant":
        raise BadRow("answer does not end with the assistant's turn")
    return tuple(messages)


def label_of(value: Any) -> bool:
    """Parse a label: true or false, 1 or 0, or these words as text."""
    labels = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if value is None:
        raise BadRow("no label")
    label = labels.get(str(value).strip().lower())
    if label is None:
        raise BadRow("label is neither true nor false (write true or false, or rename a column with another meaning)")
    return label


def _message(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise BadRow("a message is not an object")
    name = item.get("role", item.get("from"))
    if (isinstance(name, str) and name.lower() in TOOL_ROLES) or any(item.get(key) for key in TOOL_KEYS):
        raise BadRow(TOOLS)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        shown = f"of the role {name[:20]!r}" if isinstance(name, str) else "without a role"
        raise BadRow(f"a message {shown} (known are system, user, assistant)")
    content = item.get("content", item.get("value"))
    if isinstance(content, list):  # parts, as chat services write them
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise BadRow("a message with an image or another part that is not text")
        content = "".join(texts)
    return Message(role, text_of(content, "answer" if role == "assistant" else "message"))


def in_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join consecutive messages of one role, and check the order: optional system message, then user and assistant."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role:
            joined[-1] = Message(message.role, f"{joined[-1].content}\n\n{message.content}")
        else:
            joined.append(message)
    turns = joined[1:] if joined[0].role == "system" else joined
    if any(message.role == "system" for message in turns):
        raise BadRow("a system message after the start")
    if turns and turns[0].role == "assistant":
        raise AssistantFirst("the assistant speaks first")
    return tuple(joined)
