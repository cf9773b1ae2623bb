"""Chat templates of the usual kinds are split so that training and generation see the same text."""

import pytest

from pipeline.data.records import Message
from pipeline.data.template import DEFAULT_TEMPLATE
from pipeline.errors import UserError
from tests.pipeline.data.templates import (
    BRACKETS,
    CHATML,
    NO_GENERATION_PROMPT,
    NO_SYSTEM,
    SWITCH,
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
FIRST_PART = (  # of LLaVA-NeXT: a string has no such part
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content[0].text + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
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
        (FIRST_PART, chat("a", "b"), ["<user>a</s><assistant>", "b"]),
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
        (
            SWITCH,
            chat("a", "b", "c", "d"),
            [
                "/no_think\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think></think>",
                "b",
                "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think></think>",
                "d",
            ],
        ),
    ],
)
def test_prompts_and_answers_alternate(template: str, messages: tuple[Message, ...], expected: list[str]) -> None:
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
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ nope() }}", "'nope' is undefined"),
        ("{% for i in range(1000000000000) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_an_error_of_a_template_is_one_message(template: str, output: str) -> None:
    with pytest.raises(UserError, match=f"The chat template does not support the turns user: {output}"):
        segments(tokenizer(template + "{% for m in messages %}{{ m.content }}{% endfor %}"), chat("a"))


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(UserError):
        segments(tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"), chat("a"))
