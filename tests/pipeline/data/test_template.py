"""Chat templates of the usual kinds are split so that training and generation see the same text."""

import errno
import resource
import subprocess
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


def test_the_default_template() -> None:
    assert segments(tokenizer(DEFAULT_TEMPLATE), chat("hi", "hello", "2+2?", "4", system="Be kind.")) == [
        ("<s>Be kind.\n\nHuman:\nhi\n\nAssistant:\n", False),
        ("hello", True),
        ("</s>\n\nHuman:\n2+2?\n\nAssistant:\n", False),
        ("4", True),
    ]


def test_chatml() -> None:
    assert segments(tokenizer(CHATML), chat("a", "b", "c", "d")) == [
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
        ("b", True),
        ("<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", False),
        ("d", True),
    ]


def test_a_prompt_ends_where_the_answer_begins() -> None:
    for template in (DEFAULT_TEMPLATE, CHATML, NO_SYSTEM):
        hf = tokenizer(template)
        rendered = hf.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in chat("a", "b", "c")],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert "".join(text for text, _ in segments(hf, chat("a", "b", "c"))) == rendered


def test_earlier_answers_of_thinking_templates_belong_to_the_prompt() -> None:
    template = ChatTemplate(tokenizer(THINKING))
    for roles in (("user", "assistant", "user"), ("user", "assistant", "user", "assistant", "user")):
        assert [segment.is_answer for segment in template.layout(roles)] == [False]
    assert segments(tokenizer(THINKING), chat("a", "b", "c", "d")) == [
        (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            False,
        ),
        ("d", True),
    ]


def test_a_template_without_a_generation_prompt() -> None:
    assert segments(tokenizer(NO_GENERATION_PROMPT), chat("a", "b", "c", "d")) == [
        ("<user>a</s><assistant>", False),
        ("b", True),
        ("</s><user>c</s><assistant>", False),
        ("d", True),
    ]


def test_spaces_around_answers_belong_to_the_template() -> None:
    assert segments(tokenizer(BRACKETS), chat("a", "b")) == [("<s>[INST] a [/INST]", False), ("b", True)]
    assert segments(tokenizer(BRACKETS), chat("a", "b", "c"))[0][0] == "<s>[INST] a [/INST] b </s>[INST] c [/INST]"


def test_without_a_system_role_the_user_message_contains_the_system_message() -> None:
    assert segments(tokenizer(NO_SYSTEM), chat("a", "b", system="s")) == [
        ("<s><turn>user\ns\n\na<end>\n<turn>model\n", False),
        ("b", True),
    ]
    with pytest.raises(UserError, match=r"turns user, user: roles must alternate.*model\.chat_template=FILE"):
        segments(tokenizer(NO_SYSTEM), [Message("user", "a"), Message("user", "b")])


def test_templates_for_lists_of_parts_get_lists() -> None:
    """Multimodal models have such templates. For a string, their loop would write nothing."""
    parts = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    assert segments(tokenizer(parts), chat("a", "b", "c", "d", system="s")) == [
        ("<system>s</s><user>a</s><assistant>", False),
        ("b", True),
        ("</s><user>c</s><assistant>", False),
        ("d", True),
    ]


def test_a_template_that_drops_messages_is_refused() -> None:
    deaf = "{% for m in messages %}{{ '<' + m.role + '>' }}{% endfor %}"
    with pytest.raises(UserError, match=r"turns user: it supports neither .* omits a content.*model\.chat_template"):
        segments(tokenizer(deaf), chat("a"))
    no_system = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    assert segments(tokenizer(no_system), chat("a", "b", system="s")) == [("s\n\na</s>", False), ("b", True)]


def test_dates_in_templates_are_fixed() -> None:
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert segments(tokenizer(template), chat("a")) == [("26 Jul 2024a", False)]


@pytest.mark.parametrize(
    ("template", "output"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end within"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 10000000000 }}", "needs more than 1024 MiB of memory"),
        ("{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}", "needs more than 1024 MiB of memory"),
        ("{{ 'x' * 5000000 }}", "writes 50000.. characters around the messages"),
        ("{{ 9 ** (9 ** 9) }}", r"computes \*\* with integers of more than 4096 bits"),
        ("{% generation %}{{ 9**99999999 }}{% endgeneration %}", "integers of more than 4096 bits"),
        (
            "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            r"computes \* with integers of more than 4096 bits",
        ),
        ("{% for i in range(1000000000000) %}{% endfor %}", "Range too big"),
        (f"{{{{ 0x{'f' * 2000} is divisibleby 7 }}}}", "computes divisibleby with integers of more than 4096 bits"),
        ("{{ 1 | round(99999, 'ceil') }}", r"computes \*\* with integers of more than 4096 bits"),
        ("{{ 1 | round(precision=-99999) }}", r"computes \*\* with integers of more than 4096 bits"),
    ],
)
def test_templates_are_bounded(template: str, output: str) -> None:
    """A template may come from an unknown model, so its time and memory are limited."""
    limits, tracer = resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()
    with pytest.raises(UserError, match=output):
        segments(tokenizer(template + "{% for m in messages %}{{ m.content }}{% endfor %}"), chat("a"))
    assert (resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()) == (limits, tracer)


def test_a_limit_of_the_machine_is_not_an_error_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: tuple[int, int]) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/self/statm")

    monkeypatch.setattr(templates, "_limit_memory", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        segments(tokenizer(CHATML), chat("a"))


def test_a_limit_that_is_lowered_meanwhile_stays() -> None:
    """Another process may lower the hard limit of memory while a template runs."""
    program = (
        "import resource\n"
        "from pipeline.data.template import bounded\n"
        "with bounded():\n"
        "    lower = resource.getrlimit(resource.RLIMIT_AS)[0] - 1\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (lower, lower))\n"
        "assert resource.getrlimit(resource.RLIMIT_AS) == (lower, lower)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_filter_output_and_processor_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    end = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(templates, "_MOST_LINES", 2000)
    with pytest.raises(UserError, match="does not end within 2000 steps"):
        segments(tokenizer("{{ lipsum(n=1000) }}" + end), chat("a"))
    monkeypatch.setattr(templates, "_MOST_SECONDS", 0.0)
    with pytest.raises(UserError, match="does not end within 0 s"):
        segments(tokenizer("{% for i in range(99) %}{% endfor %}" + end), chat("a"))


def test_numbers_within_the_bounds_are_rounded_and_divided() -> None:
    template = (
        "{{ 42.55 | round(1, 'floor') }} {{ 9 is divisibleby 3 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert segments(tokenizer(template), chat("a")) == [("42.5 Truea", False)]


def test_long_conversations_and_stars_stay_within_the_bounds() -> None:
    assert len(segments(tokenizer(CHATML), chat(*map(str, range(20))))) == 20
    fragments = ChatTemplate(tokenizer(CHATML))._render(("user", "assistant") * 5000, generation_prompt=True)
    assert [each for each in fragments if isinstance(each, int)] == list(range(10_000))
    stars = "{{ '**bold**' }}{{ 2 ** 4095 > 3 * 5 - 2 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert segments(tokenizer(stars), chat("a")) == [("**bold**Truea", False)]


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(UserError):
        segments(tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"), chat("a"))
