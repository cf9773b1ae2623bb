"""Reward functions, judges and scoring services that fail or answer garbage."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.campaign.bad_configs import writes
from tests.campaign.bad_data import chats, lines
from tests.campaign.cases import PPO, SFT, SHORT, Case
from tests.tiny import ROOT

WITHOUT_REWARD_MODEL = ("ppo=rloo", "ppo.samples=2", "ppo.reward_model=false")
GRPO = (*SHORT, "stage=ppo", "actor=model", *PPO, *WITHOUT_REWARD_MODEL, "name=x", "data.path=a.jsonl")
REWARD = "ppo.reward_function=f.py:f"
FUNCTIONS: list[tuple[str, str, str, int]] = [
    ("a number as function", "f = 3", "there is no function f", 2),
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
    ("exits at once", "import os\ndef f(answer, row): os._exit(0)", "must not call exit", 1),
    ("returns 1e300", "def f(answer, row): return 1e300", "not a finite number", 2),
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
    ("raises", "def f(answer, row): raise OSError('down')", "raised OSError: down"),
]
Reply = tuple[int, dict[str, str], bytes]
REPLIES: list[tuple[str, Reply, str, int]] = [
    ("a score", (200, {}, b'{"score": 0.5}'), "", 0),
    ("a page", (200, {}, b"<html>hello</html>"), "JSONDecodeError|Expecting value", 2),
    ("no score", (200, {}, b'{"text": "good"}'), "KeyError: 'score'", 2),
    ("a score of NaN", (200, {}, b'{"score": NaN}'), "not a finite number", 2),
    ("escape sequences", (400, {}, b"\x1b[31mred\x1b]0;title\x07"), r"refused: 400.*\\x1b\[31mred", 2),
    ("a redirect to another service", (302, {"Location": "/other"}, b""), "redirects to /other", 2),
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


class _Service(BaseHTTPRequestHandler):
    """Gives REPLIES[N] to a request of /N; any other path, to which a redirect leads, gives a score."""

    def do_POST(self) -> None:
        number = self.path.rpartition("/")[2]
        status, headers, body = REPLIES[int(number)][1] if number.isdigit() else (200, {}, b'{"score": 1.0}')
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def service() -> Iterator[str]:
    """Run a service on this machine that gives the replies, and return its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
