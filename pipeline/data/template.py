"""Render conversations with the chat template of a tokenizer, as a sequence of text fragments.

A template is rendered with a placeholder for the content of each message. The placeholders separate the text of the
template (role marks, ends of turns) from the text of the messages. This has three effects:
contents are tokenized as plain text, the answer is a separate segment, and one rendering serves all conversations with
the same roles. The template never sees contents, so its operations on contents (removing reasoning, detecting tool
calls) have no effect.
"""

import logging
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe
from jinja2.sandbox import SandboxedEnvironment

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

_MOST_LINES = 2_000_000  # a template of 50 lines for a conversation of 10,000 messages needs a quarter of them
_MOST_SECONDS = 60.0  # of the processor; those lines take two
_MOST_BYTES = 2**30
_MOST_BITS = 4096
_MOST_CHARACTERS = 1_000_000
_COUNTED = frozenset(("<template>", jinja2.filters.__file__, jinja2.utils.__file__, markupsafe.__file__))
_one_at_a_time = threading.Lock()  # the limit of memory belongs to the process

Fragment = str | int  # text of the template, or the index of a message


@dataclass(frozen=True)
class Segment:
    """Fragments that are tokenized in one call. `is_answer`: one assistant content that counts as an answer."""

    fragments: tuple[Fragment, ...]
    is_answer: bool

    def text(self, messages: Sequence[Message]) -> str:
        return "".join(
            fragment if isinstance(fragment, str) else messages[fragment].content for fragment in self.fragments
        )


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        text = tokenizer.get_chat_template()
        self._text = _FIXED_CLOCK + text if "strftime_now" in text else text
        self._warned = False
        self._prompt = lru_cache(maxsize=4096)(self._prompt_fragments)

    def own_text(self) -> str:
        """Return the text of the template around a short conversation, which contains its control tokens."""
        fragments = self._prompt(("user", "assistant", "user"))
        return "".join(fragment for fragment in fragments if isinstance(fragment, str)) + self.after_answer()

    def after_answer(self) -> str:
        """Return the text that the template writes after the last answer."""
        last = self._render(("user", "assistant"), generation_prompt=False)[-1]
        return last if isinstance(last, str) else ""

    def between_answers(self) -> tuple[Fragment, ...]:
        """Return the fragments between two answers. Fragment 2 is the user's message."""
        fragments = self._prompt(("user", "assistant", "user"))
        return fragments[fragments.index(1) + 1 :]

    def layout(self, roles: tuple[str, ...]) -> tuple[Segment, ...]:
        """Return the segments of a prompt with its generation prompt. `roles` must not end with the assistant.

        An earlier assistant message is an answer if the text before it equals the prompt that generation would see.
        If a template rewrites earlier turns (removes reasoning), earlier assistant messages belong to the prompt, and
        only the last answer of a conversation counts.
        """
        segments: list[Segment] = []
        fragments = self._prompt(roles)
        start = 0
        for index, fragment in enumerate(fragments):
            if not isinstance(fragment, int) or roles[fragment] != "assistant":
                continue
            if fragment == 0 or fragments[:index] != self._prompt(roles[:fragment]):
                self._warn()
                continue
            segments += [Segment(fragments[start:index], False), Segment((fragment,), True)]
            start = index + 1
        segments.append(Segment(fragments[start:], False))
        return tuple(segment for segment in segments if segment.fragments)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "The chat template renders earlier answers differently from new ones, so SFT trains only on the last "
                "answer of a conversation with several turns."
            )

    def _prompt_fragments(self, roles: tuple[str, ...]) -> tuple[Fragment, ...]:
        """Return all fragments before the next answer.

        The prompt includes text that the template writes between its generation prompt and the answer (for example an
        empty block of reasoning).
        """
        prompt = self._render(roles, generation_prompt=True)
        conversation = self._render((*roles, "assistant"), generation_prompt=False)
        if len(roles) not in conversation:
            return prompt
        before_answer = conversation[: conversation.index(len(roles))]
        gap = _text_after(before_answer, prompt)
        return before_answer if gap is not None and gap.strip() else prompt

    def _render(self, roles: tuple[str, ...], *, generation_prompt: bool) -> tuple[Fragment, ...]:
        contents = [f"\ue000{index}\ue001" for index in range(len(roles))]
        try:
            return self._render_contents(roles, contents, generation_prompt)
        except jinja2.TemplateError as error:
            if len(roles) < 2 or roles[:2] != ("system", "user"):
                raise UserError(self._refusal(roles, error)) from error
            contents = [
                f"{contents[0]}\n\n{contents[1]}",
                *contents[2:],
            ]  # no system role: its text precedes that of the user
            try:
                return self._render_contents(roles[1:], contents, generation_prompt)
            except jinja2.TemplateError:
                raise UserError(self._refusal(roles, error)) from error

    def _render_contents(
        self, roles: Sequence[str], contents: Sequence[str], generation_prompt: bool
    ) -> tuple[Fragment, ...]:
        """Render contents as texts, or as lists of content parts if the template supports only those.

        Raises jinja2.TemplateError if the template rejects the turns or omits a content.
        """
        expected = {fragment for content in contents for fragment in _fragments(content) if isinstance(fragment, int)}
        for values in (contents, [[{"type": "text", "text": content}] for content in contents]):
            try:
                fragments = _fragments(self._apply(roles, values, generation_prompt))
            except TypeError:  # the template supports only the other kind
                continue
            if expected <= set(fragments):
                return fragments
        raise jinja2.TemplateRuntimeError("it supports neither texts nor content parts, or it omits a content")

    def _apply(self, roles: Sequence[str], contents: Sequence[Any], generation_prompt: bool) -> str:
        """Return the rendered text. Raises jinja2.TemplateError for every error of the template except a TypeError.

        A template reads no files, so an OSError, such as too many open files, is not an error of the template.
        """
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            with bounded():
                rendered: Any = self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=self._text,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    date_string=_TODAY,
                )
        except (jinja2.TemplateError, TypeError, OSError):
            raise
        except MemoryError as error:
            raise jinja2.TemplateRuntimeError(f"it needs more than {_MOST_BYTES // 2**20} MiB of memory") from error
        except Exception as error:  # a division by zero, a missing key, a range above the sandbox's limit
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        if len(rendered) > _MOST_CHARACTERS:
            raise jinja2.TemplateRuntimeError(
                f"it writes {len(rendered)} characters around the messages, and at most {_MOST_CHARACTERS} are allowed"
            )
        return str(rendered)

    @staticmethod
    def _refusal(roles: Sequence[str], error: Exception) -> str:
        return (
            f"The chat template does not support the turns {', '.join(roles)}: {str(error).rstrip('.')}. Change the "
            "data, or set another template with model.chat_template=FILE."
        )


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the work of a template: the lines and seconds that it runs in this thread, its integers, and its memory.

    A template comes with a model and runs in jinja2's sandbox, which bounds none of them. Lines of jinja2's filters
    count, too. Raises TemplateRuntimeError after `_MOST_LINES` lines or `_MOST_SECONDS` of the processor and for large
    integers, and MemoryError above the limit of memory. Nothing interrupts one operation on a text or a list.
    """
    lines, until = 0, time.thread_time() + _MOST_SECONDS

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in _COUNTED:
            return None
        lines += 1
        if lines > _MOST_LINES:
            raise jinja2.TemplateRuntimeError(f"it does not end within {_MOST_LINES} steps")
        if lines % 16 == 0 and time.thread_time() > until:
            raise jinja2.TemplateRuntimeError(f"it does not end within {_MOST_SECONDS:g} s")
        return count

    with _one_at_a_time:
        tracer, limit = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)[0]
        sys.settrace(count)
        try:
            _limit_memory(limit)
            with _bounded_integers():
                yield
        finally:
            sys.settrace(tracer)
            _set_soft_limit(limit)


def _limit_memory(limit: int) -> None:
    """Allow the process `_MOST_BYTES` more than now, at most `limit`. Linux only: others do not report this size."""
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        pages = int(statistics.read_text().split()[0])
        allowed = pages * resource.getpagesize() + _MOST_BYTES
        _set_soft_limit(allowed if limit == resource.RLIM_INFINITY else min(allowed, limit))


def _set_soft_limit(limit: int) -> None:
    """Limit the address space. The hard limit stays: another process may have lowered it since (`prlimit`)."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    finite = [each for each in (limit, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(finite, default=resource.RLIM_INFINITY), hard))


@contextmanager
def _bounded_integers() -> Iterator[None]:
    """Make templates that are compiled in the context refuse arithmetic with integers of more than `_MOST_BITS` bits.

    9**(9**9) and repeated squares take years in one operation, which nothing interrupts.
    """
    before = SandboxedEnvironment.intercepted_binops, SandboxedEnvironment.default_binop_table
    limited: dict[str, Callable[[Any, Any], Any]] = {
        operator: partial(_compute, operator, function) for operator, function in before[1].items()
    }
    tests, filters = jinja2.tests.TESTS, jinja2.filters.FILTERS
    functions = tests["divisibleby"], filters["round"]
    SandboxedEnvironment.intercepted_binops, SandboxedEnvironment.default_binop_table = frozenset(limited), limited
    tests["divisibleby"], filters["round"] = _divisible_by, _round
    try:
        yield
    finally:
        tests["divisibleby"], filters["round"] = functions
        SandboxedEnvironment.intercepted_binops, SandboxedEnvironment.default_binop_table = before


def _divisible_by(value: Any, num: Any) -> bool:
    """Replace jinja2's test `divisibleby`."""
    return bool(_compute("divisibleby", jinja2.tests.test_divisibleby, value, num))


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    """Replace jinja2's filter `round`, which computes 10**precision."""
    _compute("**", lambda left, right: None, 10, abs(precision))
    return jinja2.filters.do_round(value, precision, method)


def _compute(operator: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Return the result of an operator of a template. Raises TemplateRuntimeError if an integer has too many bits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "**" and right > 0:
            bits = max(bits, (left.bit_length() - 1) * right)
        if bits > _MOST_BITS:
            raise jinja2.TemplateRuntimeError(f"it computes {operator} with integers of more than {_MOST_BITS} bits")
    return function(left, right)


def _fragments(text: str) -> tuple[Fragment, ...]:
    texts = _PLACEHOLDER.split(text)
    fragments: list[Fragment] = [int(text) if index % 2 else text for index, text in enumerate(texts)]
    return tuple(fragment for fragment in fragments if fragment != "")


def _text_after(fragments: tuple[Fragment, ...], start: tuple[Fragment, ...]) -> str | None:
    """Return the text of `fragments` after `start`; None if `start` is no prefix or a content follows."""
    text, prefix = _joined(fragments), _joined(start)
    if not text.startswith(prefix):
        return None
    rest = text[len(prefix) :]
    return None if _PLACEHOLDER.search(rest) else rest


def _joined(fragments: tuple[Fragment, ...]) -> str:
    return "".join(fragment if isinstance(fragment, str) else f"\ue000{fragment}\ue001" for fragment in fragments)
