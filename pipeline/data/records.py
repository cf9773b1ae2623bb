"""The three records that data files become. Everything after the readers works on these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""A row of the data, by column."""


@dataclass(frozen=True)
class Message:
    """One turn. `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the assistant: its last message is not the assistant's.

    `row` is what it was read from, where that was asked for; no part of what the prompt is.
    """

    messages: tuple[Message, ...]
    source: str
    row: Row | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Conversation:
    """A conversation to imitate: at least one assistant message, the last one included."""

    messages: tuple[Message, ...]
    source: str

    def prompt(self) -> Prompt:
        return Prompt(self.messages[:-1], self.source)


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the first preferred. `margin` is how much, in the labeller's own unit (0: unknown)."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str
    source: str
    margin: float = 0.0
