"""Services that are down, slow or answer garbage from some request on: a reward service, a judge, wandb and the hub."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
WANDB = ("tracking=wandb",)
Answer = Callable[["ServiceHandler"], None]


class ServiceHandler(BaseHTTPRequestHandler):
    """Gives scores, and after `good` requests the fault of the case."""

    fault: Answer | None = None
    good, requests = GOOD, 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        type(self).requests += 1
        if self.fault is not None and self.requests > self.good:
            self.fault()
        else:
            answer = json.loads(body)["answer"]
            self.reply(200, json.dumps({"score": len(answer) % 7 / 7}).encode())

    do_GET = do_PUT = do_HEAD = do_POST  # of wandb

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


def never(handler: ServiceHandler) -> None:
    time.sleep(8)
    handler.close_connection = True


def drops(handler: ServiceHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def disconnect(handler: ServiceHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"score"')
    handler.close_connection = True


def drips(handler: ServiceHandler) -> None:
    """Send a byte a second, so that no single wait is long."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(1)
    handler.close_connection = True


def endless(handler: ServiceHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * (1 << 20))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Print nothing: a client that ends is expected."""


@contextmanager
def serving(fault: Answer | None, good: int = GOOD) -> Iterator[str]:
    """Run a service that fails after `good` requests, and yield its address."""
    handler = type("Handler", (ServiceHandler,), {"fault": fault and (lambda self: fault(self)), "good": good})
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


def tracked(fault: Answer | None, scene: Scene) -> None:
    """Track with a wandb service that fails, or with None on a port where nothing listens."""
    with serving(fault, good=0) if fault else nullcontext("http://127.0.0.1:9/score") as address:
        base = address.removesuffix("/score")
        scene.environment |= {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": base, "no_proxy": "*"}
        scene.start()
        scene.end()


def cases() -> list[Fault]:
    """Return the cases. The campaign of inputs has services whose every reply is wrong."""
    silent = r"does not answer|rank 0 .host .*_post"
    rewards: list[tuple[str, Answer, str, tuple[int, ...]]] = [
        ("never replies", never, silent, (2, 5)),
        ("replies a byte a second", drips, silent, (2, 5)),
        ("drops connections", drops, "does not answer", (2,)),
        ("cuts its replies off", disconnect, "does not answer", (2,)),
        ("replies without end", endless, "does not answer|more than|MemoryError|rank 0", (2, 5)),
        ("replies 500", replies(500, b"\x1b[31merror"), r"refused: 500.*\\x1b", (2,)),
        ("replies 429", replies(429, b"slow down", Retry_After="1"), "refused: 429", (2,)),
        ("replies NaN", replies(200, b'{"score": NaN}'), "not a finite number|not a number", (2,)),
    ]
    found = [
        Fault("service", f"{kind}: {name}", partial(scores, answer), says, statuses, keys=keys, function=FUNCTION)
        for kind, keys, chosen in (("rewards", GRPO, rewards), ("judge", JUDGE, [rewards[0], *rewards[-2:]]))
        for name, answer, says, statuses in chosen
    ]
    found += [
        Fault("service", f"{kind}: goes down", goes_down, says, statuses, ranks=ranks, keys=keys, function=FUNCTION)
        for kind, keys, says, statuses, ranks in (
            ("rewards", GRPO, "does not answer", (2,), 1),
            ("judge", JUDGE, "does not answer|^(?!.*error)", (0, 2), 2),
        )
    ]
    trackers: dict[str, Answer | None] = {
        "never replies": never,
        "drops connections": drops,
        "replies 401": replies(401, b"no"),
        "replies a page": replies(200, b"<html>"),
        "cuts its replies off": disconnect,
        "is down": None,
    }
    return found + [
        Fault("service", f"wandb: {name}", partial(tracked, answer), "warning: wandb", (0,), "sft", own_keys=WANDB)
        for name, answer in trackers.items()
    ]
