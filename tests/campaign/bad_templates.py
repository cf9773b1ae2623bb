"""Chat templates that fail or omit messages."""

from collections.abc import Callable

from tests.campaign.bad_configs import writes
from tests.campaign.bad_data import chats, lines, turns
from tests.campaign.cases import SFT, TINY, Case

CONTENT = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
REFUSED: list[tuple[str, str | bytes, str]] = [
    ("divides by zero", "{{ 1 / 0 }}" + CONTENT, "ZeroDivisionError"),
    ("calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + CONTENT, "RecursionError"),
    ("a range of 10**12", "{% for i in range(1000000000000) %}{% endfor %}" + CONTENT, "OverflowError|Range too big"),
    ("an unknown function", "{{ nope() }}" + CONTENT, "'nope' is undefined"),
    ("an open block", "{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
    ("raises", "{{ raise_exception('never') }}", "never"),
    ("raises with escape sequences", "{{ raise_exception('\x1b[31mred\x07') }}", r"\\x1b\[31mred\\x07"),
    ("reads a file", "{% include '/etc/hostname' %}" + CONTENT, "no loader|template"),
    ("a key that is missing", "{{ messages[99].content }}" + CONTENT, "undefined|has no element"),
    ("is a list", "{{ messages }}", "omits a content|template"),
]
LEGAL: list[tuple[str, str]] = [
    ("plain", CONTENT),
    ("a long preamble", "{{ 'be kind ' * 4 }}" + CONTENT),
]


def cases() -> list[Case]:
    """Return the cases."""
    keys = ("data.path=a.jsonl", "model.tokenizer=tok", "model.chat_template=t.jinja", "sft.max_length=200")

    def case(name: str, says: str, prepare: Callable[[], None], status: int = 2) -> Case:
        return Case("template", name, (*TINY, *SFT, *keys), says, status, prepare, needs=("tok",))

    rows = lines(turns(*["user", "assistant"] * 30, count=8))
    late = _files("{% if messages | length > 9 %}{{ 1 / 0 }}{% endif %}" + CONTENT, rows)
    return [
        *(case(name, says, _files(template)) for name, template, says in REFUSED),
        *(case(name, "", _files(template), status=0) for name, template in LEGAL),
        case("fails after nine turns", "ZeroDivisionError", late),
    ]


def _files(template: str | bytes, rows: str = "") -> Callable[[], None]:
    def prepare() -> None:
        writes("t.jinja", template)()
        writes("a.jsonl", rows or lines(chats()))()

    return prepare
