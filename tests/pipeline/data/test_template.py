"""Chat templates of the usual kinds are split so that training and generation see the same text."""

import resource
import sys

import pytest

from pipeline.data import template as templates
from pipeline.data.records import Message
from pipeline.data.template import DEFAULT_TEMPLATE, ChatTemplate
from pipeline.errors import UserError
from tests.pipeline.data.templates import (
    BRACKETS,
    CHATML,
    NO_GENERATION_PROMPT,
    NO_SYSTEM,
    THINKING,
    chat,
    segments,
    tokenizer,
)

PARTS = (  # of a multimodal model: for a string, its loop would write nothing
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
OMITS_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
DATE = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            DEFAULT_TEMPLATE,
            chat("hi", "hello", "2+2?", "4", system="Be kind."),
            ["<s>Be kind.\n\nHuman:\nhi\n\nAssistant:\n", "hello", "</s>\n\nHuman:\n2+2?\n\nAssistant:\n", "4"],
        ),
        (
            CHATML,
            chat("a", "b", "c", "d"),
            [
                "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
                "b",
                "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
                "d",
            ],
        ),
        (
            NO_GENERATION_PROMPT,
            chat("a", "b", "c", "d"),
            ["<user>a</s><assistant>", "b", "</s><user>c</s><assistant>", "d"],
        ),
        (BRACKETS, chat("a", "b"), ["<s>[INST] a [/INST]", "b"]),
        (BRACKETS, chat("a", "b", "c"), ["<s>[INST] a [/INST] b </s>[INST] c [/INST]"]),
        (NO_SYSTEM, chat("a", "b", system="s"), ["<s><turn>user\ns\n\na<end>\n<turn>model\n", "b"]),
        (OMITS_SYSTEM, chat("a", "b", system="s"), ["s\n\na</s>", "b"]),
        (
            PARTS,
            chat("a", "b", "c", system="s"),
            ["<system>s</s><user>a</s><assistant>", "b", "</s><user>c</s><assistant>"],
        ),
        (
            THINKING,  # earlier answers belong to the prompt
            chat("a", "b", "c", "d"),
            [
                "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
                "<|im_start|>assistant\n<think>\n\n</think>\n\n",
                "d",
            ],
        ),
        (DATE, chat("a"), ["26 Jul 2024a"]),
    ],
)
def test_prompts_and_answers_alternate(template: str, messages: list[Message], expected: list[str]) -> None:
    assert segments(tokenizer(template), messages) == [(text, place % 2 == 1) for place, text in enumerate(expected)]


def test_a_template_that_drops_or_refuses_messages_is_refused() -> None:
    deaf = "{% for m in messages %}{{ '<' + m.role + '>' }}{% endfor %}"
    with pytest.raises(UserError, match=r"turns user: it supports neither .* omits a content.*model\.chat_template"):
        segments(tokenizer(deaf), chat("a"))
    with pytest.raises(UserError, match=r"turns user, user: roles must alternate.*model\.chat_template=FILE"):
        segments(tokenizer(NO_SYSTEM), [Message("user", "a"), Message("user", "b")])


@pytest.mark.parametrize(
    ("template", "output"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end within"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 10000000000 }}", "needs more than 1024 MiB of memory"),
        ("{{ 'x' * 5000000 }}", "writes 50000.. characters around the messages"),
        ("{{ 9 ** (9 ** 9) }}", r"computes \*\* with integers of more than 4096 bits"),
        ("{% generation %}{{ 9**99999999 }}{% endgeneration %}", "integers of more than 4096 bits"),
        (
            "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            r"computes \* with integers of more than 4096 bits",
        ),
        (f"{{{{ 0x{'f' * 2000} is divisibleby 7 }}}}", "computes divisibleby with integers of more than 4096 bits"),
        ("{{ 1 | round(precision=-99999) }}", r"computes \*\* with integers of more than 4096 bits"),
    ],
)
def test_templates_are_bounded(template: str, output: str) -> None:
    """A template may come from an unknown model, so its time and memory are limited."""
    limits, tracer = resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()
    with pytest.raises(UserError, match=output):
        segments(tokenizer(template + "{% for m in messages %}{{ m.content }}{% endfor %}"), chat("a"))
    assert (resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()) == (limits, tracer)


def test_filter_output_and_processor_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    end = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(templates, "_MOST_LINES", 2000)
    with pytest.raises(UserError, match="does not end within 2000 steps"):
        segments(tokenizer("{{ lipsum(n=1000) }}" + end), chat("a"))
    monkeypatch.setattr(templates, "_MOST_SECONDS", 0.0)
    with pytest.raises(UserError, match="does not end within 0 s"):
        segments(tokenizer("{% for i in range(99) %}{% endfor %}" + end), chat("a"))


def test_long_conversations_and_stars_stay_within_the_bounds() -> None:
    assert len(segments(tokenizer(CHATML), chat(*map(str, range(20))))) == 20
    fragments = ChatTemplate(tokenizer(CHATML))._render(("user", "assistant") * 5000, generation_prompt=True)
    assert [each for each in fragments if isinstance(each, int)] == list(range(10_000))
    stars = "{{ '**bold**' }}{{ 2 ** 4095 > 3 * 5 - 2 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert segments(tokenizer(stars), chat("a")) == [("**bold**Truea", False)]


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(UserError):
        segments(tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"), chat("a"))
