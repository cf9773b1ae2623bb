"""Reward functions, judges and scoring services that fail or answer garbage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.campaign.bad_configs import writes
from tests.campaign.bad_data import chats, lines
from tests.campaign.cases import PPO, SFT, SHORT, Case
from tests.campaign.service_faults import ServiceHandler, serving
from tests.tiny import ROOT

WITHOUT_REWARD_MODEL = ("ppo=rloo", "ppo.samples=2", "ppo.reward_model=false")
GRPO = (*SHORT, "stage=ppo", "actor=model", *PPO, *WITHOUT_REWARD_MODEL, "name=x", "data.path=a.jsonl")
REWARD = "ppo.reward_function=f.py:f"
FUNCTIONS: list[tuple[str, str, str, int]] = [
    ("a syntax error", "def f(answer, row:", "SyntaxError in line 1", 2),
    ("an error at import", "1 / 0", "ZeroDivisionError.*line 1", 2),
    ("an exit at import", "raise SystemExit", "can't be run: SystemExit", 2),
    ("no function", "def g(answer, row): return 1", "there is no function f in f.py; it has g", 2),
    ("a number as function", "f = 3", "there is no function f", 2),
    ("one parameter", "def f(answer): return 1", "can't be called with an answer and a row", 2),
    ("a coroutine", "async def f(answer, row): return 1", "is asynchronous", 2),
    ("zero bytes", "\x00", "can't be run", 2),
    ("raises", "def f(answer, row): return row['nope']", "raised KeyError: 'nope' .line 1.", 2),
    (
        "raises escape sequences",
        "def f(answer, row): raise ValueError('\\x1b[31mred\\x1b]0;x\\x07')",
        r"\\x1b\[31mred",
        2,
    ),
    ("raises a long text", "def f(answer, row): raise ValueError('x' * 10**6)", "raised ValueError: xxx", 2),
    ("recurses", "def f(answer, row): return f(answer, row)", "RecursionError", 2),
    ("exits", "import sys\ndef f(answer, row): sys.exit(0)", "raised SystemExit", 2),
    ("exits at once", "import os\ndef f(answer, row): os._exit(0)", "must not call exit", 1),
    ("returns None", "def f(answer, row): pass", "returned NoneType, not a number", 2),
    ("returns a text", "def f(answer, row): return '1'", "returned str, not a number", 2),
    ("returns a list", "def f(answer, row): return [1]", "returned list, not a number", 2),
    ("returns NaN", "def f(answer, row): return float('nan')", "returned nan, not a finite number", 2),
    ("returns infinity", "def f(answer, row): return float('inf')", "returned inf, not a finite number", 2),
    ("returns 1e300", "def f(answer, row): return 1e300", "not a finite number", 2),
    ("returns 10**400", "def f(answer, row): return 10**400", "not a number", 2),
    ("returns an empty dictionary", "def f(answer, row): return {}", "a dictionary with the keys", 2),
    ("returns odd names", "def f(answer, row): return {'a b': 1}", "a dictionary with the keys", 2),
    (
        "returns other names each time",
        "import itertools\nn = itertools.count()\ndef f(answer, row): return {f'a{next(n)}': 1}",
        "return the same names",
        2,
    ),
    ("changes the row", "def f(answer, row): row.clear(); return 1", "", 0),
    ("returns true", "def f(answer, row): return True", "returned bool|", 0),
    ("returns a dictionary", "def f(answer, row): return {'a': 1, 'b': 2.5}", "", 0),
    ("prints", "def f(answer, row): print('scoring'); return 1", "", 0),
]
JUDGES: list[tuple[str, str, str]] = [
    ("above 1", "def f(answer, row): return 2", "returned 2.0, not a number from 0 to 1"),
    ("below 0", "def f(answer, row): return -0.1", "not a number from 0 to 1"),
    ("raises", "def f(answer, row): raise OSError('down')", "raised OSError: down"),
]
Reply = tuple[int, dict[str, str], bytes]
REPLIES: list[tuple[str, Reply, str, int]] = [
    ("a score", (200, {}, b'{"score": 0.5}'), "", 0),
    ("404", (404, {}, b"nothing here"), "refused: 404", 2),
    ("a page", (200, {}, b"<html>hello</html>"), "JSONDecodeError|Expecting value", 2),
    ("no reply", (200, {}, b""), "JSONDecodeError|Expecting value", 2),
    ("a list", (200, {}, b"[1, 2]"), "raised", 2),
    ("no score", (200, {}, b'{"text": "good"}'), "KeyError: 'score'", 2),
    ("a score of text", (200, {}, b'{"score": "high"}'), "could not convert", 2),
    ("a score of null", (200, {}, b'{"score": null}'), "TypeError", 2),
    ("a score of NaN", (200, {}, b'{"score": NaN}'), "not a finite number", 2),
    ("a score of 5,000 digits", (200, {}, b'{"score": %s}' % (b"1" * 5000)), "4300", 2),
    ("bytes that are no text", (200, {}, b"\xff\xfe\x00"), "raised", 2),
    ("100,000 brackets", (200, {}, b"[" * 100_000), "RecursionError", 2),
    ("escape sequences", (400, {}, b"\x1b[31mred\x1b]0;title\x07"), r"refused: 400.*\\x1b\[31mred", 2),
    ("a redirect to another service", (302, {"Location": "/other"}, b""), "redirects to /other", 2),
    ("a permanent redirect", (308, {"Location": "http://127.0.0.1:1/"}, b""), "redirects to http://127.0.0.1:1/", 2),
]


def cases() -> list[Case]:
    """Return the cases."""
    found = [
        Case("function", name, (*GRPO, REWARD), says, status, _files(code), needs=("model",))
        for name, code, says, status in FUNCTIONS
    ]
    judge = ("stage=sft", "model.path=model", *SHORT, *SFT, "data.path=a.jsonl", "evaluation.judge=f.py:f")
    found += [
        Case("function", f"a judge: {name}", judge, says, prepare=_files(code), needs=("model",))
        for name, code, says in JUDGES
    ]
    function = f"ppo.reward_function={ROOT}/examples/rewards/service.py:score"
    for number, (name, _, says, status) in enumerate(REPLIES):
        environment = {"ZEROCHAT_SERVICE": f"{{service}}/{number}", "no_proxy": "*"}
        found.append(
            Case("service", name, (*GRPO, function), says, status, _files(""), ("model",), environment=environment)
        )
    for name, address in (("no address", ""), ("an address that is no URL", "file:///etc/passwd")):
        says, environment = "has to be the address of the service", {"ZEROCHAT_SERVICE": address}
        found.append(Case("service", name, (*GRPO, function), says, 2, _files(""), ("model",), environment))
    return found


def _files(code: str) -> Callable[[], None]:
    def prepare() -> None:
        Path("f.py").write_text(code)
        writes("a.jsonl", lines(chats()))()

    return prepare


def _reply(handler: ServiceHandler) -> None:
    """Give REPLIES[N] to a request of /N; any other path, to which a redirect leads, gives a score."""
    number = handler.path.rpartition("/")[2]
    status, headers, body = REPLIES[int(number)][1] if number.isdigit() else (200, {}, b'{"score": 1.0}')
    handler.reply(status, body, **headers)


@contextmanager
def service() -> Iterator[str]:
    """Run a service on this machine that gives the replies, and return its address."""
    with serving(_reply, good=0) as address:
        yield address
