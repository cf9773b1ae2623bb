"""Render conversations with the chat template of a tokenizer, as a sequence of pieces.

A template is rendered with a placeholder for the content of each message. The placeholders separate the text of the
template (role marks, ends of turns) from the text of the messages. This has three effects:
contents are tokenized as plain text, the answer is a separate segment, and one rendering serves all conversations with
the same roles. The template never sees contents, so its operations on contents (removing reasoning, detecting tool
calls) have no effect.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from pipeline.data.records import Message
from pipeline.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# For tokenizers without a template (OPT, GPT-2, Pythia): roles in words, the end token after each answer. A line
# break before the content lets it begin with the tokens that base models know from the start of a line.
DEFAULT_TEMPLATE = (
    "{%- if bos_token is defined and bos_token %}{{ bos_token }}{% endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ message.content }}{{ '\\n\\n' }}"
    "{%- elif message.role == 'user' -%}{{ 'Human:\\n' }}{{ message.content }}{{ '\\n\\n' }}"
    "{%- else -%}{{ 'Assistant:\\n' }}{{ message.content }}{{ eos_token }}{{ '\\n\\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:\\n' }}{%- endif -%}"
)

_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
# Some templates write today's date. A run that is resumed tomorrow must write the same one.
_TODAY = "26 Jul 2024"
_FIXED_CLOCK = "{%- macro strftime_now(format) -%}" + _TODAY + "{%- endmacro %}"

Piece = str | int  # text of the template, or the index of a message


@dataclass(frozen=True)
class Segment:
    """Pieces that are tokenized in one call. `is_answer`: one assistant content that counts as an answer."""

    pieces: tuple[Piece, ...]
    is_answer: bool

    def text(self, messages: Sequence[Message]) -> str:
        return "".join(piece if isinstance(piece, str) else messages[piece].content for piece in self.pieces)


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        text = tokenizer.get_chat_template()
        self._text = _FIXED_CLOCK + text if "strftime_now" in text else text
        self._warned = False
        self.layout = lru_cache(maxsize=4096)(self._layout)
        self._prompt = lru_cache(maxsize=4096)(self._prompt_pieces)

    def own_text(self) -> str:
        """Return the text of the template around a short conversation, which contains its control tokens."""
        pieces = self._prompt(("user", "assistant", "user"))
        return "".join(piece for piece in pieces if isinstance(piece, str)) + self.after_answer()

    def after_answer(self) -> str:
        """Return the text that the template writes after the last answer."""
        last = self._render(("user", "assistant"), generation_prompt=False)[-1]
        return last if isinstance(last, str) else ""

    def _layout(self, roles: tuple[str, ...]) -> tuple[Segment, ...]:
        """Return the segments of a prompt with its generation prompt. `roles` must not end with the assistant.

        An earlier assistant message is an answer if the text before it equals the prompt that generation would see.
        If a template rewrites earlier turns (removes reasoning), earlier assistant messages belong to the prompt, and
        only the last answer of a conversation counts.
        """
        segments: list[Segment] = []
        pieces = self._prompt(roles)
        start = 0
        for place, piece in enumerate(pieces):
            if not isinstance(piece, int) or roles[piece] != "assistant":
                continue
            if piece == 0 or pieces[:place] != self._prompt(roles[:piece]):
                self._warn()
                continue
            segments += [Segment(pieces[start:place], False), Segment((piece,), True)]
            start = place + 1
        segments.append(Segment(pieces[start:], False))
        return tuple(segment for segment in segments if segment.pieces)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "The chat template renders earlier answers differently from new ones, so SFT trains only on the last "
                "answer of a conversation with several turns."
            )

    def _prompt_pieces(self, roles: tuple[str, ...]) -> tuple[Piece, ...]:
        """Return all pieces before the next answer.

        The prompt includes text that the template writes between its generation prompt and the answer (for example an
        empty block of reasoning).
        """
        asked = self._render(roles, generation_prompt=True)
        answered = self._render((*roles, "assistant"), generation_prompt=False)
        if len(roles) not in answered:
            return asked
        whole = answered[: answered.index(len(roles))]
        gap = _rest(whole, asked)
        return whole if gap is not None and gap.strip() else asked

    def _render(self, roles: tuple[str, ...], *, generation_prompt: bool) -> tuple[Piece, ...]:
        contents = [f"\ue000{index}\ue001" for index in range(len(roles))]
        try:
            return self._whole(roles, contents, generation_prompt)
        except jinja2.TemplateError as error:
            if len(roles) < 2 or roles[:2] != ("system", "user"):
                raise UserError(self._refusal(roles, error)) from error
            contents = [f"{contents[0]}\n\n{contents[1]}", *contents[2:]]  # no system role: the user says it
            try:
                return self._whole(roles[1:], contents, generation_prompt)
            except jinja2.TemplateError:
                raise UserError(self._refusal(roles, error)) from error

    def _whole(self, roles: Sequence[str], contents: Sequence[str], generation_prompt: bool) -> tuple[Piece, ...]:
        """Render contents as texts, or as lists of content parts if the template supports only those.

        Raises jinja2.TemplateError if the template rejects the turns or omits a content.
        """
        wanted = {piece for content in contents for piece in _pieces(content) if isinstance(piece, int)}
        for given in (contents, [[{"type": "text", "text": content}] for content in contents]):
            try:
                pieces = _pieces(self._apply(roles, given, generation_prompt))
            except TypeError:  # made for the other of the two
                continue
            if wanted <= set(pieces):
                return pieces
        raise jinja2.TemplateRuntimeError("it takes neither texts nor parts, or leaves out what is said")

    def _apply(self, roles: Sequence[str], contents: Sequence[Any], generation_prompt: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        rendered: Any = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._text,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            date_string=_TODAY,
        )
        return str(rendered)

    @staticmethod
    def _refusal(roles: Sequence[str], error: Exception) -> str:
        return (
            f"The chat template can't write a conversation of the turns {', '.join(roles)}: {str(error).rstrip('.')}. "
            "Change the data, or give another template with model.chat_template=FILE."
        )


def segments(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Return [(text, is_answer)] of a conversation: the texts of the prompt, then the last answer.

    If the last message is not from the assistant, return only the texts of the prompt.
    """
    roles = tuple(message.role for message in messages)
    answered = roles[-1] == "assistant"
    layout = ChatTemplate(tokenizer).layout(roles[:-1] if answered else roles)
    texts = [(segment.text(messages), segment.is_answer) for segment in layout]
    return [*texts, (messages[-1].content, True)] if answered else texts


def _pieces(text: str) -> tuple[Piece, ...]:
    parts = _PLACEHOLDER.split(text)
    pieces: list[Piece] = [int(part) if place % 2 else part for place, part in enumerate(parts)]
    return tuple(piece for piece in pieces if piece != "")


def _rest(whole: tuple[Piece, ...], start: tuple[Piece, ...]) -> str | None:
    """Return the text of `whole` after `start`; None if `start` is no prefix or a content follows."""
    flat, head = _flat(whole), _flat(start)
    if not flat.startswith(head):
        return None
    rest = flat[len(head) :]
    return None if _PLACEHOLDER.search(rest) else rest


def _flat(pieces: tuple[Piece, ...]) -> str:
    return "".join(piece if isinstance(piece, str) else f"\ue000{piece}\ue001" for piece in pieces)
