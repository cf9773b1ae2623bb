"""The decoding thread: it admits the requests of all clients into the batches of their models.

The event loop of the server submits requests and receives tokens. One thread runs all models, because a second thread
would compete with it for the same cores or the same GPU.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine import Sampling
from pipeline.serve.errors import ServeError

log = logging.getLogger(__name__)
WAITING_PER_SLOT = 32  # requests that may wait for each slot of a model


class Token(Protocol):
    """A sampled token of the engine's sessions (`Generator.session`)."""

    @property
    def request(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def raw(self) -> tuple[float, list[tuple[int, float]]] | None: ...
    @property
    def finish(self) -> str | None: ...


class Session(Protocol):
    """A batch that accepts requests while it decodes (`Generator.session`)."""

    @property
    def busy(self) -> bool: ...
    @property
    def slots(self) -> int: ...
    def add(
        self,
        request: int,
        prompt: Sequence[int],
        sampling: Sampling,
        sample_seed: int,
        text: Callable[[list[int]], str] | None = None,
    ) -> None: ...
    def abort(self, request: int) -> None: ...
    def step(self) -> Sequence[Token]: ...


@dataclass(frozen=True)
class Job:
    """One answer to generate. `text` turns token ids into text, for stop strings."""

    prompt: Sequence[int]
    sampling: Sampling
    sample_seed: int
    text: Callable[[list[int]], str]


class Batcher:
    """Decodes the jobs of several models in one thread. Use it as an asynchronous context manager."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = dict(sessions)
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Of each model: the numbers of its requests that have not ended, with the queues of their answers.
        self._answers: dict[str, dict[int, asyncio.Queue[tuple[int, Token | Exception]]]] = {n: {} for n in sessions}
        self._thread = threading.Thread(target=self._decode, name="decode", daemon=True)

    async def __aenter__(self) -> "Batcher":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def check_waiting(self, model: str) -> None:
        """Raise ServeError if too many requests of a model wait."""
        if len(self._answers[model]) >= self._sessions[model].slots * (1 + WAITING_PER_SLOT):
            raise ServeError(429, "too many requests are waiting; send the request again later", "rate_limit_exceeded")

    async def stream(self, model: str, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Token], None]:
        """Yield (index of the job, token) of several jobs. Ending or cancelling the iteration frees their slots.

        The jobs share one queue, so that a token wakes one task. Raises ServeError if generation fails.
        """
        session, answers = self._sessions[model], self._answers[model]
        answer: asyncio.Queue[tuple[int, Token | Exception]] = asyncio.Queue()
        indices = {next(self._numbers): index for index in range(len(jobs))}
        for number, index in indices.items():
            answers[number] = answer
            self._inbox.put(partial(self._add, model, number, jobs[index]))
        try:
            while indices:
                number, token = await answer.get()
                if isinstance(token, Exception):
                    raise ServeError(500, str(token), "server_error") from token
                index = indices[number]
                if token.finish is not None:
                    del answers[number], indices[number]
                yield index, token
        finally:
            for number in indices:
                del answers[number]
                self._inbox.put(partial(session.abort, number))

    def _add(self, model: str, number: int, job: Job) -> None:
        try:
            self._sessions[model].add(number, job.prompt, job.sampling, job.sample_seed, job.text)
        except Exception as error:
            self._send(model, [(number, error)])

    def _decode(self) -> None:
        """Run the sessions in turn until the batcher is closed; wait while none has work."""
        while True:
            busy = [model for model, session in self._sessions.items() if session.busy]
            try:
                message = self._inbox.get(block=not busy)
                while message is not None:
                    message()
                    message = self._inbox.get_nowait()
                return
            except queue.Empty:
                pass
            for model in busy:
                self._step(model)

    def _step(self, model: str) -> None:
        session = self._sessions[model]
        try:
            self._send(model, [(token.request, token) for token in session.step()])
        except Exception as error:  # the requests of the batch fail, the server continues
            log.exception("a decoding step failed")
            live = list(self._answers[model])
            for number in live:
                session.abort(number)
            self._send(model, [(number, error) for number in live])

    def _send(self, model: str, items: Sequence[tuple[int, Token | Exception]]) -> None:
        """Hand tokens or errors over to the event loop."""
        if items:
            self._loop.call_soon_threadsafe(self._deliver, model, items)

    def _deliver(self, model: str, items: Sequence[tuple[int, Token | Exception]]) -> None:
        for number, item in items:
            answer = self._answers[model].get(number)
            if answer is not None:
                answer.put_nowait((number, item))
