"""A server in a thread of the test, on a port that the kernel assigns."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import uvicorn
from openai import OpenAI
from starlette.applications import Starlette

from pipeline.serve.batcher import Token
from pipeline.serve.models import ServedModel

LIMIT = 120.0  # seconds; a condition that is not met by then fails its test


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.005)


@contextmanager
def served(app: Starlette, grace: int = 5) -> Iterator[str]:
    """Run an application; provide its address. At the end, running requests have `grace` seconds."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=grace))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def pause_after(tokens: int, model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let a model sample this many tokens, and no more until the returned event is set."""
    step, go_on, sampled = model.session.step, threading.Event(), 0

    def paused_step() -> Sequence[Token]:
        nonlocal sampled
        if sampled >= tokens and not go_on.is_set():
            time.sleep(0.005)
            return []
        actual = step()
        sampled += len(actual)
        return actual

    monkeypatch.setattr(model.session, "step", paused_step)
    return go_on


def client_of(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LIMIT)
