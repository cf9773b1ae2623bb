"""Parse tools, the calls of tools in answers, and the results of calls, into the form that chat templates read.

Templates read OpenAI's form: tools and calls are `{"type": "function", "function": {...}}`, and the arguments of a call
are an object. Data files have these forms, too: functions without the outer object, arguments as JSON text, and turns
of the roles `function_call` and `observation` (ShareGPT). Arrow tables fill the fields that an object lacks with nulls,
so nulls are removed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.data.records import BadRow, Message, replace_surrogates

RESULT_FIELDS = ("name", "tool_call_id")
_WRITTEN = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Parse the tools of a conversation: a list, JSON text of a list, or nothing. Raises BadRow."""
    tools = _parsed(value, "tools that are not JSON")
    if not tools:
        return []
    if not isinstance(tools, list):
        raise BadRow("tools are not a list")
    return [{"type": "function", "function": _without_nulls(_function(tool, "a tool"))} for tool in tools]


def with_tools(messages: tuple[Message, ...], value: Any) -> tuple[Message, ...]:
    """Return a conversation whose first message has the tools of a row. Raises BadRow."""
    tools = tools_of(value)
    if not tools:
        return messages
    fields = json.dumps({**messages[0].turn.parsed(), "tools": tools}, ensure_ascii=False)
    return (replace(messages[0], fields=replace_surrogates(fields)), *messages[1:])


def calls_of(value: Any) -> list[dict[str, Any]]:
    """Parse the calls of a message: a call, a list of calls, or JSON text of one of these. Raises BadRow."""
    value = _parsed(value, "a call that is not JSON")
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list):
        raise BadRow("tool calls are not a list")
    return [_call(call) for call in calls]


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return an answer without its calls, and the calls.

    Calls have the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes and Qwen models, and our own
    templates). Text in this form that is no valid call stays text.
    """
    try:
        calls = [call for match in _WRITTEN.finditer(text) for call in calls_of(match[1])]
    except BadRow:
        return text, []
    return (_WRITTEN.sub("\n", text).strip(), calls) if calls else (text, [])


def result_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return which call a result belongs to, as far as the message says so."""
    return {key: item[key] for key in RESULT_FIELDS if isinstance(item.get(key), str)}


def result_text(content: Any) -> Any:
    """Return the content of a result; an object or a number becomes JSON text."""
    is_value = isinstance(content, Mapping | int | float) or (
        isinstance(content, list) and not all(isinstance(part, Mapping) and "text" in part for part in content)
    )
    return json.dumps(content, ensure_ascii=False) if is_value else content


def _call(call: Any) -> dict[str, Any]:
    function = _function(call, "a tool call")
    arguments = _parsed(function.get("arguments", function.get("parameters")), "arguments that are not JSON")
    if not isinstance(arguments, Mapping | None):
        raise BadRow("the arguments of a tool call are not an object")
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    called = {"name": function["name"], "arguments": _without_nulls(arguments or {})}
    return {"type": "function", **number, "function": called}


def _function(item: Any, what: str) -> Mapping[str, Any]:
    """Return the function of a tool or a call, with or without the outer object."""
    if not isinstance(item, Mapping):
        raise BadRow(f"{what} is not an object")
    if item.get("type") not in (None, "function"):
        raise BadRow(f"{what} is not a function")
    function = item.get("function") or {key: value for key, value in item.items() if key not in ("type", "id")}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{what} has no name")
    return function


def _parsed(value: Any, fault: str) -> Any:
    """Return what a text contains as JSON; any other value unchanged, and nothing for an empty text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(fault) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
