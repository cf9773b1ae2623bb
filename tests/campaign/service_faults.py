"""Services that are down, slow or answer garbage from some request on: a reward service, a judge, wandb and the hub."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.campaign.hang_faults import GRPO
from tests.campaign.scenes import Fault, Scene
from tests.tiny import ROOT

GOOD = 6  # requests before the fault: more than the first evaluation
FUNCTION = f"""
import os
import runpy

def f(answer, row):
    return len(answer) % 7 / 7

if os.environ.get("ZEROCHAT_SERVICE"):
    f = runpy.run_path("{ROOT}/examples/rewards/service.py")["score"]
    f.__globals__["PAUSES"], f.__globals__["SECONDS"] = (0, 0.2, 0.4), 3
"""
"""Scores that are the same with a service and without."""
JUDGE = ("evaluation.judge=f.py:f",)
Answer = Callable[["_Handler"], None]


class _Handler(BaseHTTPRequestHandler):
    """Gives scores, and after `GOOD` requests the fault of the case."""

    fault: Answer | None = None
    requests = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        type(self).requests += 1
        if self.fault is not None and self.requests > GOOD:
            self.fault()
        else:
            answer = json.loads(body)["answer"]
            self.reply(200, json.dumps({"score": len(answer) % 7 / 7}).encode())

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def replies(status: int, body: bytes, **headers: str) -> Answer:
    return lambda handler: handler.reply(status, body, **headers)


def never(handler: _Handler) -> None:
    time.sleep(8)
    handler.close_connection = True


def drops(handler: _Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def disconnect(handler: _Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"score"')
    handler.close_connection = True


def drips(handler: _Handler) -> None:
    """Send a byte a second, so that no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(1)
    handler.close_connection = True


def endless(handler: _Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * (1 << 20))


def recovers(handler: _Handler) -> None:
    """Refuse two requests of three."""
    if handler.requests % 3:
        handler.reply(503, b"busy")
    else:
        handler.reply(200, b'{"score": 0}')


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Print nothing: a client that ends is expected."""


@contextmanager
def serving(fault: Answer | None) -> Iterator[str]:
    """Run the service, and yield its address."""
    handler = type("Handler", (_Handler,), {"fault": fault and (lambda self: fault(self)), "requests": 0})
    with _Server(("127.0.0.1", 0), handler) as server:
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()


def scores(fault: Answer | None, scene: Scene) -> None:
    """Score with a service that fails."""
    with serving(fault) as address:
        scene.environment |= {"ZEROCHAT_SERVICE": address, "no_proxy": "*"}
        scene.start()
        scene.end()
    with serving(None) as address:
        scene.environment["ZEROCHAT_SERVICE"] = address
        scene.complete()


def goes_down(scene: Scene) -> None:
    """Close the service's port while the run uses it."""
    with serving(None) as address:
        scene.environment |= {"ZEROCHAT_SERVICE": address, "no_proxy": "*"}
        scene.start()
        scene.reach(2)
    scene.end()
    with serving(None) as address:
        scene.environment["ZEROCHAT_SERVICE"] = address
        scene.complete()


def tracked(fault: Answer, scene: Scene) -> None:
    """Track with a wandb service that fails."""
    handler = type("Handler", (_Handler,), {"fault": lambda self: fault(self), "requests": GOOD})
    handler.do_GET = handler.do_PUT = handler.do_HEAD = handler.do_POST
    with _Server(("127.0.0.1", 0), handler) as server:
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        scene.environment |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": address, "no_proxy": "*"}
        scene.start()
        scene.end()
        server.shutdown()


def untracked(scene: Scene) -> None:
    """Track with a wandb service on a port where nothing listens."""
    scene.environment |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "no_proxy": "*"}
    scene.start()
    scene.end()


def cases() -> list[Fault]:
    """Return the cases."""
    faults: list[tuple[str, Answer, str, tuple[int, ...]]] = [
        ("never replies", never, r"does not answer|rank 0 .host .*_post", (2, 5)),
        ("replies a byte a second", drips, r"does not answer|rank 0 .host .*_post", (2, 5)),
        ("drops connections", drops, "does not answer", (2,)),
        ("cuts its replies off", disconnect, "does not answer", (2,)),
        ("replies without end", endless, "does not answer|more than|MemoryError|rank 0", (2, 5)),
        ("replies 500", replies(500, b"\x1b[31merror"), r"refused: 500.*\\x1b", (2,)),
        ("replies 429", replies(429, b"slow down", Retry_After="1"), "refused: 429", (2,)),
        ("replies 401", replies(401, b"who are you"), "refused: 401", (2,)),
        ("replies a page", replies(200, b"<html>maintenance</html>"), "JSON|Expecting value", (2,)),
        ("replies nothing", replies(200, b""), "JSON|Expecting value", (2,)),
        ("replies NaN", replies(200, b'{"score": NaN}'), "not a finite number|not a number", (2,)),
        ("replies a redirect", replies(302, b"", Location="http://127.0.0.1:9/"), "redirects to", (2,)),
    ]
    good: Answer = replies(200, b"")
    found = []
    for name, answer, says, statuses in faults:
        for kind, keys in (("rewards", GRPO), ("judge", JUDGE)):
            found.append(
                Fault(
                    "service", f"{kind}: {name}", partial(scores, answer), says, statuses, keys=keys, function=FUNCTION
                )
            )
    found += [
        Fault("service", "rewards: goes down", goes_down, "does not answer", (2,), keys=GRPO, function=FUNCTION),
        Fault(
            "service",
            "judge: goes down",
            goes_down,
            "does not answer|^(?!.*error)",
            (0, 2),
            keys=JUDGE,
            function=FUNCTION,
            ranks=2,
        ),
    ]
    for name, answer in (
        ("never replies", never),
        ("drops connections", drops),
        ("replies 500", replies(500, b"no")),
        ("replies 401", replies(401, b"no")),
        ("replies a page", replies(200, b"<html>")),
        ("replies nothing", good),
        ("cuts its replies off", disconnect),
    ):
        found.append(
            Fault(
                "service",
                f"wandb: {name}",
                partial(tracked, answer),
                "warning: wandb",
                (0,),
                "sft",
                own_keys=("tracking=wandb",),
            )
        )
    found.append(
        Fault("service", "wandb: is down", untracked, "warning: wandb", (0,), "sft", own_keys=("tracking=wandb",))
    )
    return found
