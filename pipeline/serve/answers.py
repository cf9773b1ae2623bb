"""Answers in the form of OpenAI's API: text without stop strings, log-probabilities, chunks of a stream."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.answer_text import AnswerText
from pipeline.data.records import replace_surrogates
from pipeline.data.tool_calls import split_calls
from pipeline.serve.batcher import Token


@dataclass
class Choice:
    """One answer of a response. `tokens` counts its tokens, the end token included.

    may_call: the answer may call tools, so its text is divided into content and calls when it is complete
    """

    text: AnswerText
    describe: Callable[[Token], Any] | None  # returns the entry of a token in the log-probabilities
    may_call: bool = False
    tokens: int = 0
    finish: str | None = None
    entries: list[Any] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The text so far."""
        return self.text.text

    def take(self, token: Token) -> str:
        """Add a token, and return the new text. The text of an answer that may call tools comes with its end."""
        self.tokens += 1
        self.finish = token.finish
        new = self.text.feed(token.token)
        if token.finish is not None:
            new += self.text.finish()
        if self.describe is not None:
            self.entries.append(self.describe(token))
        if not self.may_call:
            return new
        return "" if token.finish is None else self.content

    def message(self, text: str) -> dict[str, Any]:
        """Return the fields of a message with this text, and set the reason of the end to "tool_calls" if it calls."""
        content, calls = split_calls(text) if self.may_call else (text, [])
        if not calls:
            return {"content": content}
        self.finish = "tool_calls" if self.finish == "stop" else self.finish
        return {"content": content or None, "tool_calls": [_call(call) for call in calls]}

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
    message = {"role": "assistant", **choice.message(choice.content), "refusal": None}
    logprobs = None if choice.describe is None else {"content": choice.drain_entries(), "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


def _chat_delta(index: int, choice: Choice, text: str) -> dict[str, Any]:
    logprobs = None if choice.describe is None else {"content": choice.drain_entries(), "refusal": None}
    delta = choice.message(text) if text or choice.finish is None else {}
    for number, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = number
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call in OpenAI's form: with an id, and its arguments as JSON text."""
    written = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    function = {"name": replace_surrogates(call["function"]["name"]), "arguments": replace_surrogates(written)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


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
            "top_logprobs": [
                {each["token"]: each["logprob"] for each in (*entry["top_logprobs"], entry)} for entry in entries
            ],  # the sampled token is always among them
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
