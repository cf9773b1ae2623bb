"""Answers in the form of OpenAI's API: text without stop strings, log-probabilities, chunks of a stream."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.participant import Detokenizer
from pipeline.serve.batcher import Token


class AnswerText:
    """Text of an answer while it is sampled. Text from the first stop string on is left out.

    The end of the text is held back while it may be the beginning of a stop string. With `strips`, the text has no
    white space at its ends. Stop strings may have white space, so `decode` must not strip.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], *, strips: bool = False) -> None:
        self._detokenizer, self._stops, self._strips = Detokenizer(decode), stops, strips
        self._held = ""
        self._space: str | None = None  # white space that more text must follow; None before the first text
        self._stopped = False

    def feed(self, token: int) -> str:
        """Add a token, and return the text that is certain now."""
        self._held += self._detokenizer.feed(token)
        return self._release(self._length_of_possible_stop())

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        self._held += self._detokenizer.finish()
        return self._release(0)

    def _release(self, hold: int) -> str:
        """Return the held text without its last `hold` characters, or up to the first stop string."""
        begins = [self._held.find(stop) for stop in self._stops if stop in self._held]
        end = min(begins) if begins else len(self._held) - hold
        text, self._held = "" if self._stopped else self._held[:end], self._held[end:]
        self._stopped = self._stopped or bool(begins)
        return self._stripped(text) if self._strips else text

    def _stripped(self, text: str) -> str:
        """Return the text with the white space before it, and hold the white space at its end."""
        text = text.lstrip() if self._space is None else self._space + text
        shown = text.rstrip()
        if shown or self._space is not None:
            self._space = text[len(shown) :]
        return shown

    def _length_of_possible_stop(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(self._held)) + 1)
            if self._held.endswith(stop[:length])
        )
        return max(lengths, default=0)


@dataclass
class Choice:
    """One answer of a response. `tokens` counts its tokens, the end token included."""

    text: AnswerText
    describe: Callable[[Token], Any] | None  # returns the entry of a token in the log-probabilities
    content: str = ""
    tokens: int = 0
    finish: str | None = None
    entries: list[Any] = field(default_factory=list)

    def take(self, token: Token) -> str:
        """Add a token, and return the new text."""
        self.tokens += 1
        self.finish = token.finish
        new = self.text.feed(token.token)
        if token.finish is not None:
            new += self.text.finish()
        if self.describe is not None:
            self.entries.append(self.describe(token))
        self.content += new
        return new

    def drain_entries(self) -> list[Any]:
        """Return the entries since the last call."""
        entries, self.entries = self.entries, []
        return entries


@dataclass(frozen=True)
class Endpoint:
    """What distinguishes the two endpoints: names, and how a choice is written."""

    prefix: str
    object: str
    chunk_object: str
    full: Callable[[int, Choice], dict[str, Any]]
    delta: Callable[[int, Choice, str], dict[str, Any]]
    opening: Callable[[int], dict[str, Any]] | None = None

    def head(self, model: str, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that all chunks of an answer share."""
        kind = self.chunk_object if chunk else self.object
        return {"id": self.prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": model}


def _chat_full(index: int, choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.content, "refusal": None}
    logprobs = None if choice.describe is None else {"content": choice.drain_entries(), "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


def _chat_delta(index: int, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = None if choice.describe is None else {"content": choice.drain_entries(), "refusal": None}
    delta = {"content": text} if text or choice.finish is None else {}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish}


def _chat_opening(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _completion_full(index: int, choice: Choice) -> dict[str, Any]:
    return _completion_delta(index, choice, choice.content)


def _completion_delta(index: int, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = None
    if choice.describe is not None:
        entries = choice.drain_entries()
        logprobs = {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{each["token"]: each["logprob"] for each in entry["top_logprobs"]} for entry in entries],
            "text_offset": [],
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}


CHAT = Endpoint(
    "chatcmpl-", "chat.completion", "chat.completion.chunk", full=_chat_full, delta=_chat_delta, opening=_chat_opening
)
COMPLETION = Endpoint("cmpl-", "text_completion", "text_completion", full=_completion_full, delta=_completion_delta)


def event(content: Mapping[str, Any]) -> str:
    """Return one event of a stream."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    """Return the numbers of tokens of a response. A prompt counts once for all its answers."""
    sampled = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
