"""The decoding thread with a batch that the test controls: disconnects, failures, a full queue, stop strings."""

import asyncio
import json
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

import zerochat
from engine import Sampling
from pipeline.chat.answer_text import AnswerText
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message
from pipeline.serve.app import create_app
from pipeline.serve.batcher import WAITING_PER_SLOT
from pipeline.serve.command import main
from pipeline.serve.models import ServedModel
from tests.pipeline.serve.running import client_of, served, wait_until
from tests.ranks import Worker
from tests.test_chat import save_model, write_manifest


class Sampled(NamedTuple):
    request: int
    token: int
    raw: None = None
    finish: str | None = None


class Endless:
    """A batch of one slot whose answers never end; `failure` makes the next step fail."""

    slots = 1

    def __init__(self) -> None:
        self.live: list[int] = []
        self.aborted: list[int] = []
        self.failure: Exception | None = None
        self.stepping = threading.Event()
        self.stepping.set()

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def add(
        self,
        request: int,
        prompt: Sequence[int],
        sampling: Sampling,
        sample_seed: int,
        text: Callable[[list[int]], str] | None = None,
    ) -> None:
        if sampling.seed == 13:
            raise ValueError("no room for this one")
        self.live.append(request)

    def abort(self, request: int) -> None:
        if request in self.live:
            self.live.remove(request)
            self.aborted.append(request)

    def step(self) -> list[Sampled]:
        self.stepping.wait(60)
        time.sleep(0.02)  # a batch that takes no time would fill the queues of the event loop
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return [Sampled(request, 70) for request in self.live]


@pytest.fixture
def session() -> Endless:
    return Endless()


@pytest.fixture
def url(session: Endless) -> Iterator[str]:
    tokenizer = train_tokenizer(["hello there"], 300)
    with served(create_app({"m": ServedModel("m", tokenizer, session, 256)}, key=None)) as address:
        yield address


def send(url: str, *, stream: bool, seed: int = 1) -> socket.socket:
    """Send a request, and return the connection without reading the answer."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": stream, "seed": seed}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slot(url: str, session: Endless, stream: bool) -> None:
    with send(url, stream=stream) as connection:
        wait_until(lambda: session.busy)
        if stream:
            assert connection.recv(100)
        assert session.aborted == []
    wait_until(lambda: not session.busy)
    assert len(session.aborted) == 1


def test_a_failing_step_fails_its_requests_and_nothing_else(url: str, session: Endless) -> None:
    for stream in (False, True):
        session.stepping.clear()
        errors: list[openai.APIError] = []

        def ask(stream: bool = stream, errors: list[openai.APIError] = errors) -> None:
            with client_of(url) as client, pytest.raises(openai.APIError) as caught:
                answer = client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hello"}], stream=stream
                )
                if stream:
                    list(answer)
            errors.append(caught.value)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: session.busy)
        session.failure = FloatingPointError("the logits of the model are NaN")
        session.stepping.set()
        thread.join()
        assert "the logits of the model are NaN" in str(errors[0])
        wait_until(lambda: not session.busy)


def test_a_request_that_the_batch_refuses_gets_an_error(url: str) -> None:
    with client_of(url) as client, pytest.raises(openai.InternalServerError, match="no room for this one"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], seed=13)


def test_requests_get_an_error_when_the_server_ends(session: Endless) -> None:
    """A stream that just ended would look like a complete answer."""
    models = {"m": ServedModel("m", train_tokenizer(["hello there"], 300), session, 256)}
    with served(create_app(models, key=None), grace=1) as url:
        connections = [send(url, stream=stream) for stream in (False, True)]
        wait_until(lambda: len(session.live) == 2)
    full, streamed = (connection.makefile().read() for connection in connections)
    assert full.startswith("HTTP/1.1 503 ") and streamed.startswith("HTTP/1.1 200 ")
    assert all('"message":"the server has ended; ' in answer for answer in (full, streamed))


def test_an_error_of_the_server_itself_has_no_traceback(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ServedModel, "encode")
    with client_of(url) as client, pytest.raises(openai.InternalServerError, match="the server failed: AttributeError"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


def test_a_slow_chat_template_delays_no_other_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renders, go_on = threading.Event(), threading.Event()

    def slow(self: ServedModel, messages: Sequence[Message]) -> list[int]:
        renders.set()
        assert go_on.wait(60)
        return [1]

    monkeypatch.setattr(ServedModel, "encode", slow)
    with send(url, stream=False):
        assert renders.wait(60)
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
                assert response.status == 200
        finally:
            go_on.set()


def test_a_full_queue_refuses_further_requests(url: str, session: Endless) -> None:
    session.stepping.clear()
    connections = [send(url, stream=False) for _ in range(1 + WAITING_PER_SLOT)]
    wait_until(lambda: bool(session.live))
    session.stepping.set()
    wait_until(lambda: len(session.live) == 1 + WAITING_PER_SLOT)
    with client_of(url) as client, pytest.raises(openai.RateLimitError, match="too many requests"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    for connection in connections:
        connection.close()
    wait_until(lambda: not session.busy)


# Stop strings


def texts(stops: list[str], characters: str, *, strips: bool = False) -> list[str]:
    """The text after each character, and after the end."""
    answer = AnswerText(lambda ids: bytes(ids).decode(), stops, strips=strips)
    return [*(answer.feed(ord(character)) for character in characters), answer.finish()]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    assert texts(["END"], "aENbENDc") == ["a", "", "", "ENb", "", "", "", "", ""]
    assert texts(["aab"], "aaab") == ["", "", "a", "", ""]
    assert texts(["END"], "xEN") == ["x", "", "", "EN"]
    assert texts(["bc", "abcd"], "abcd") == ["", "", "a", "", ""]
    assert texts([], "ab") == ["a", "b", ""]


def test_a_stop_string_before_the_shortest_length_is_text() -> None:
    answer = AnswerText(lambda ids: bytes(ids).decode(), ["END"], least=6)
    shown = [answer.feed(token) for token in b"ENDaENDb"] + [answer.finish()]
    assert shown == ["", "", "END", "a", "", "", "", "", ""] and answer.text == "ENDa"


def test_a_stop_string_may_end_with_the_white_space_that_is_stripped() -> None:
    assert "".join(texts(["Q:\n"], " yes \nQ:\n", strips=True)) == "yes"
    assert texts([], " a  b ", strips=True) == ["", "a", "", "", "  b", "", ""]
    assert texts([], "  ", strips=True) == ["", "", ""]


# The command


def test_a_port_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--port", "65536"]) == 2
    assert "127.0.0.1:65536 cannot be used (a port is a number from 0 to 65535)" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.listen()
        assert main([str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "set another --port" in shown
    assert main([str(tmp_path / "nothing"), "--port", "0"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_second_ctrl_c_prints_no_traceback() -> None:
    """uvicorn cancels the lifespan of the application, and logs its failures."""
    requests, sent = iter([{"type": "lifespan.startup"}]), []

    async def receive() -> Any:
        for request in requests:
            return request
        raise asyncio.CancelledError

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(create_app({}, key=None)({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def serve_with_ctrl_c(run: Path) -> None:
    # A shell starts background commands with SIGINT ignored, and Python then raises no KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(zerochat.main(["serve", str(run), "--port", "0"]))


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    save_model(tmp_path / "sft" / "model", 0)
    write_manifest(tmp_path, sft="finished")
    process = Worker(serve_with_ctrl_c, tmp_path, environment={})
    try:
        greeting = next((line for line in iter(process.read_line, "") if line.startswith("serving sft at ")), "")
        assert greeting, "the command ended without an address"
        with client_of(greeting.split()[3].partition("/v1")[0]) as client:
            answer = client.chat.completions.create(
                model="sft", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
        assert answer.choices[0].finish_reason in ("stop", "length")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate()
        assert (process.returncode, rest) == (130, "")
    finally:
        process.send_signal(signal.SIGKILL)
