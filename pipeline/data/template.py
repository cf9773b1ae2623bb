"""Render conversations with the chat template of a tokenizer, as a sequence of text fragments.

A template is rendered with a placeholder for the content of each message. The placeholders separate the text of the
template (role marks, ends of turns) from the text of the messages. This has three effects:
contents are tokenized as plain text, the answer is a separate segment, and one rendering serves all conversations with
the same turns. The template never sees contents, so its operations on contents (removing reasoning, detecting tool
calls) have no effect.

It sees tools and their calls (`Message.fields`), and what it writes of them is text of the template. An answer with
calls is the text between its prompt and its end.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from pipeline.data.records import REASONING, REASONING_KEYS, Message, Turn
from pipeline.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For tokenizers without a template (OPT, GPT-2, Pythia): roles in words, the end token after each answer. A line
# break before the content lets it begin with the tokens that base models know from the start of a line.
# Calls of tools have the form of the Hermes models, which servers can parse.
DEFAULT_TEMPLATE = (
    "{%- if bos_token is defined and bos_token %}{{ bos_token }}{% endif -%}"
    "{%- if tools -%}{{ 'Tools:\\n' }}"
    "{%- for tool in tools -%}{{ tool.function | tojson }}{{ '\\n' }}{%- endfor -%}{{ '\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ message.content }}{{ '\\n\\n' }}"
    "{%- elif message.role == 'user' -%}{{ 'Human:\\n' }}{{ message.content }}{{ '\\n\\n' }}"
    "{%- elif message.role == 'tool' -%}{{ 'Tool:\\n' }}{{ message.content }}{{ '\\n\\n' }}"
    "{%- else -%}{{ 'Assistant:\\n' }}{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}{{ '\\n' if message.content or not loop.first }}"
    "{{ '<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}{%- endfor -%}"
    "{{ eos_token }}{{ '\\n\\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:\\n' }}{%- endif -%}"
)

# Of the content of message i. Templates that write a result as JSON escape the quotation mark.
_PLACEHOLDER = re.compile('\ue000(\\d+)(?:(\\\\)?"\ue001|\ue001)')
# Some templates write today's date. A run that is resumed tomorrow must write the same one.
_TODAY = "26 Jul 2024"
_FIXED_CLOCK = "{%- macro strftime_now(format) -%}" + _TODAY + "{%- endmacro %}"

THINKING = "{#- The model thinks before it answers. -#}"
"""A comment at the start of a template: its prompts leave reasoning to the model."""
# Of the templates of Qwen, GLM and Nemotron 3, and of DeepSeek. Without them, some templates ask for
# reasoning in the system message, or open a block of reasoning before the answer.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_REASONING_INDEX = 1 << 20  # the index of the reasoning of message 0
_OPEN_REASONING = re.compile(r"<think>(\s*)$")  # at the end of a prompt
_NO_TOOLS = "it does not write the tools or their calls"

USER, ASSISTANT = Turn("user"), Turn("assistant")
Fragment = str | int  # text of the template, or the index of a message


class JsonText(int):
    """The index of a message whose content the template writes inside of a JSON text."""


def content_of(fragment: int, messages: Sequence[Message]) -> str:
    """Return the content of a message, or its reasoning, as the template writes it."""
    if fragment >= _REASONING_INDEX:
        return messages[fragment - _REASONING_INDEX].reasoning
    content = messages[fragment].content
    return json.dumps(content, ensure_ascii=False)[1:-1] if isinstance(fragment, JsonText) else content


@dataclass(frozen=True)
class Segment:
    """Fragments that are tokenized in one call.

    answer: the index of the message whose answer they are, or None
    control: the ids of the control tokens in the text of the template, which the tokenizer adds
    context: the end of the text before them, which some tokenizers need
    """

    fragments: tuple[Fragment, ...]
    answer: int | None = None
    control: tuple[int, ...] = ()
    context: str = ""

    @property
    def is_answer(self) -> bool:
        return self.answer is not None

    def text(self, messages: Sequence[Message]) -> str:
        return "".join(
            fragment if isinstance(fragment, str) else content_of(fragment, messages) for fragment in self.fragments
        )


class ChatTemplate:
    """The chat template of one tokenizer.

    thinks: the model thinks before it answers (`THINKING`, or the template always begins an answer with reasoning)
    lead: white space with which answers begin; it is set before the first call of `answer` or `layout`
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer, self.lead = tokenizer, ""
        self.thinks = tokenizer.get_chat_template().startswith(THINKING)
        self.thinks = self.thinks or bool(_OPEN_REASONING.search(self._prompt_text((USER,))))
        self.answer = lru_cache(maxsize=4096)(self._answer)
        self._prompt = lru_cache(maxsize=4096)(self._prompt_text)

    def control_tokens(self) -> dict[int, str]:
        """Return {id: text} of the control tokens: special tokens, and role marks of the template."""
        hf, fragments = self._tokenizer, _fragments(self._prompt((USER, ASSISTANT, USER)))
        own = "".join(fragment for fragment in fragments if isinstance(fragment, str)) + self.after_answer()
        control = {
            token: added.content
            for token, added in hf.added_tokens_decoder.items()
            if added.special or (added.content in own and not added.content.replace(" ", "").isalnum())
        }
        if self.thinks:  # the marks of reasoning are part of an answer
            control = {token: text for token, text in control.items() if text not in ("<think>", "</think>")}
        control |= {token: str(hf.convert_ids_to_tokens(token)) for token in hf.all_special_ids}
        if hf.unk_token_id not in (None, hf.eos_token_id, hf.bos_token_id, hf.pad_token_id):
            control.pop(hf.unk_token_id, None)  # it represents characters that the vocabulary lacks
        return {token: text for token, text in control.items() if text.strip()}

    def before_answer(self) -> tuple[str, str]:
        """Return a prompt, and the white space that the template writes between it and the answer."""
        prompt = self._prompt((USER,))
        return _PLACEHOLDER.sub("a", prompt), self._gap((USER,), prompt)

    def after_answer(self) -> str:
        """Return the text that the template writes after the last answer."""
        last = self._render((USER, ASSISTANT), generation_prompt=False)[-1]
        return last if isinstance(last, str) else ""

    def ends(self, turns: tuple[Turn, ...]) -> bool:
        """Return whether the template ends the last turn, an answer, as it ends an answer without calls."""
        after = self.after_answer()
        return bool(after) and _joined(self._render(turns, generation_prompt=False)).endswith(after)

    def between(self, turns: tuple[Turn, ...], end_text: str) -> tuple[Fragment, ...]:
        """Return the fragments between an answer with its end token and the next one.

        The content of turns[i] has the index 2 + i. An answer before results of tools has a call for each of them.
        end_text: the text of the end token
        """
        calls = []
        for result in (turn.parsed() for turn in turns if turn.role == "tool"):
            call = {"type": "function", "function": {"name": result.get("name", "function"), "arguments": {}}}
            calls.append(call | ({"id": result["tool_call_id"]} if "tool_call_id" in result else {}))
        answer = Turn("assistant", json.dumps({"tool_calls": calls})) if calls else ASSISTANT
        text, body = self._prompt((USER, answer, *turns)), _joined(self.answer((USER, answer)))
        # Earlier answers may have no block of reasoning before their content, and some templates omit that of calls.
        end = body[max(0, body.find(_placeholder(1))) :]
        if end not in text:
            raise UserError(
                "The chat template writes an earlier answer differently from the last one, so a conversation cannot go "
                "on after it. Set another template with model.chat_template=FILE."
            )
        rest = text.partition(end)[2]
        if end_text and rest.lstrip().startswith(end_text):  # Llama 2: a space before the end token
            rest = rest.lstrip().removeprefix(end_text)
        return _fragments(rest)

    def layout(self, turns: tuple[Turn, ...], end: str = "") -> tuple[Segment, ...]:
        """Return the segments of a prompt with its generation prompt. `turns` must not end with the assistant.

        end: the text of the end token, which belongs to an answer that it follows

        An earlier assistant message is an answer if the text before it equals the prompt that generation would see.
        If a template rewrites earlier turns (removes reasoning), earlier assistant messages belong to the prompt.
        """
        segments: list[Segment] = []
        text, start = self._prompt(turns), 0
        for index, turn in enumerate(turns):
            if turn.role != "assistant" or index == 0:
                continue
            prompt = self._prompt(turns[:index])
            answered = prompt + _joined(self.answer(turns[: index + 1]))
            if text.startswith(answered):
                before, start = text[start : len(prompt)], len(answered)
                start += len(end) if text.startswith(end, start) else 0
                segments += [Segment(_fragments(before)), Segment(_fragments(text[len(prompt) : start]), index)]
        segments.append(Segment(_fragments(text[start:])))
        return tuple(segment for segment in segments if segment.fragments)

    def _answer(self, turns: tuple[Turn, ...]) -> tuple[Fragment, ...]:
        """Return the fragments of the last turn, an answer, without the text that the template writes after it."""
        if not turns[-1].fields and not self.thinks:
            return tuple(fragment for fragment in (self.lead, len(turns) - 1) if fragment != "")
        prompt, text = self._prompt(turns[:-1]), _joined(self._render(turns, generation_prompt=False))
        opened = _OPEN_REASONING.search(prompt)
        if opened and not text.startswith(prompt) and "tool_calls" not in turns[-1].parsed():
            # DeepSeek R1, QwQ: a prompt opens the block of reasoning, and the text of a conversation has no block.
            reasoning = [len(turns) - 1 + _REASONING_INDEX] * (REASONING in turns[-1].parsed())
            return (*reasoning, f"{opened[1]}</think>{2 * opened[1]}", len(turns) - 1)
        if not text.startswith(prompt):
            raise UserError(
                "The chat template begins an answer differently from a prompt, because the answer has a tool call, or "
                "has no reasoning. Change the data, or set another template with model.chat_template=FILE."
            )
        answer = _fragments(text.removeprefix(prompt).removesuffix(self.after_answer()))
        names = [call["function"]["name"] for call in turns[-1].parsed().get("tool_calls", [])]
        own = "".join(fragment for fragment in answer if isinstance(fragment, str))
        if any(own.count(name) < names.count(name) for name in names):  # the names are also in the list of tools
            raise UserError(self._refusal([turn.role for turn in turns], _NO_TOOLS))
        if REASONING in turns[-1].parsed() and len(turns) - 1 + _REASONING_INDEX not in answer:
            raise UserError(
                "The chat template does not write the reasoning of an answer (reasoning_content). Write the reasoning "
                "into the content, or set another template with model.chat_template=FILE."
            )
        return answer

    def _prompt_text(self, turns: tuple[Turn, ...]) -> str:
        """Return the text before the next answer, with placeholders of contents.

        The prompt includes text that the template writes between its generation prompt and the answer (for example an
        empty block of reasoning), unless the model thinks.
        """
        prompt = _joined(self._render(turns, generation_prompt=True))
        gap = "" if self.thinks else self._gap(turns, prompt)
        return prompt + gap if gap.strip() else prompt

    def _gap(self, turns: tuple[Turn, ...], prompt: str) -> str:
        """Return the text that the template writes between a prompt and the content of the answer; "" if not plain."""
        text = _joined(self._render((*turns, ASSISTANT), generation_prompt=False))
        before, answer, _ = text.partition(_placeholder(len(turns)))
        gap = before.removeprefix(prompt)
        return gap if answer and before.startswith(prompt) and not _PLACEHOLDER.search(gap) else ""

    def _render(self, turns: tuple[Turn, ...], *, generation_prompt: bool) -> tuple[Fragment, ...]:
        messages = [_message(index, turn) for index, turn in enumerate(turns)]
        tools = next((message.pop("tools") for message in messages if "tools" in message), None)
        roles, variants, errors = [turn.role for turn in turns], [messages], list[jinja2.TemplateError]()
        if roles[:2] == ["system", "user"]:  # for a template without a system role, its text precedes that of the user
            first = messages[1] | {"content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            variants.append([first, *messages[2:]])
        for variant in variants:
            try:
                return self._render_messages(variant, tools, generation_prompt)
            except jinja2.TemplateError as error:
                errors.append(error)
        raise UserError(self._refusal(roles, errors[0])) from errors[0]

    def _render_messages(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool
    ) -> tuple[Fragment, ...]:
        """Render contents as texts or as lists of content parts, and arguments of calls as objects or as JSON texts.

        Raises jinja2.TemplateError if the template rejects the turns, or omits a content, the tools or a call.
        """
        calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
        names = [tool["function"]["name"] for tool in tools or []] + [call["name"] for call in calls]
        contents = "".join(message["content"] for message in messages if "tool_calls" not in message)
        expected = {fragment for fragment in _fragments(contents) if isinstance(fragment, int)}
        kinds: list[Callable[[dict[str, Any]], dict[str, Any]]] = [dict, _with_parts]
        if calls:
            kinds += [_with_json_arguments]
        undefined: jinja2.UndefinedError | None = None
        for kind in kinds:
            try:
                fragments = _fragments(self._apply(list(map(kind, messages)), tools, generation_prompt))
            except TypeError:  # the template supports only another kind
                continue
            except jinja2.UndefinedError as error:  # also if it reads the field of a part in a text
                undefined = undefined or error
                continue
            if expected <= set(fragments):
                own = "".join(fragment for fragment in fragments if isinstance(fragment, str))
                if not all(name in own for name in names):
                    raise jinja2.TemplateRuntimeError(_NO_TOOLS)
                return fragments
        raise undefined or jinja2.TemplateRuntimeError(
            "it supports neither texts nor content parts, or it omits a content"
        )

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool) -> str:
        """Return the rendered text. Raises jinja2.TemplateError for every error of the template except a TypeError."""
        switches: dict[str, Any] = dict.fromkeys(_THINKING_SWITCHES, self.thinks)
        text = self._tokenizer.get_chat_template(tools=tools)  # some tokenizers have a template of its own for tools
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=_FIXED_CLOCK + text if "strftime_now" in text else text,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                date_string=_TODAY,
                **switches,
            )
        except (jinja2.TemplateError, TypeError):
            raise
        except Exception as error:  # a division by zero, a missing key, a range above the sandbox's limit
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        return str(rendered)

    @staticmethod
    def _refusal(roles: Sequence[str], error: Exception | str) -> str:
        return (
            f"The chat template does not support the turns {', '.join(roles)}: {str(error).rstrip('.')}. Change the "
            "data, or set another template with model.chat_template=FILE."
        )


def _message(index: int, turn: Turn) -> dict[str, Any]:
    """Return a message for a template, with a placeholder as its content."""
    mark = '"' if turn.role == "tool" else ""  # which a template escapes if it writes the content as JSON
    message = {"role": turn.role, "content": f"\ue000{index}{mark}\ue001", **turn.parsed()}
    if message.pop(REASONING, False):
        message |= dict.fromkeys(REASONING_KEYS, _placeholder(index + _REASONING_INDEX))
    return message


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return message | {"tool_calls": calls} if calls else message


def _fragments(text: str) -> tuple[Fragment, ...]:
    fragments: list[Fragment] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        index = int(match[1])
        fragments += [text[end : match.start()], JsonText(index) if match[2] else index]
        end = match.end()
    fragments.append(text[end:])
    return tuple(fragment for fragment in fragments if fragment != "")


def _joined(fragments: tuple[Fragment, ...]) -> str:
    return "".join(fragment if isinstance(fragment, str) else _placeholder(fragment) for fragment in fragments)


def _placeholder(fragment: int) -> str:
    mark = '\\"' if isinstance(fragment, JsonText) else ""
    return f"\ue000{fragment}{mark}\ue001"
