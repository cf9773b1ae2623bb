"""The three types of records. The readers convert rows of data files into them."""

from collections.abc import Mapping
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
class Preference:
    """A preferred and a rejected answer to one prompt. `margin`: strength of the preference (0: unknown)."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str
    margin: float = 0.0
