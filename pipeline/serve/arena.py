"""The arena: two models answer a prompt without their names, and people vote.

A round answers one prompt. The server generates and stores the answers, so a page that is reloaded, or connects again,
continues to read the same round. Names leave the server only after the vote.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.data.records import Message
from pipeline.serve.answers import Choice, event
from pipeline.serve.batcher import Batcher, Job
from pipeline.serve.errors import ServeError
from pipeline.serve.models import ServedModel
from pipeline.serve.requests import ChatRequest, parse, read_json
from pipeline.serve.votes import SIDES, Contestant, VoteFile, preference

LONGEST_COMMENT = 10_000  # characters
MOST_ROUNDS = 1000  # older rounds are forgotten
ROUND_FIELDS = {"messages", "temperature", "top_p", "max_tokens"}


class VoteRequest(BaseModel):
    """The body of POST /arena/votes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    round: str
    vote: Literal["left", "right", "both", "neither"]
    comment: str = Field("", max_length=LONGEST_COMMENT)


@dataclass
class Side:
    """One answer of a round. `index` is the number of the model."""

    index: int
    job: Job
    choice: Choice


@dataclass
class Round:
    """A prompt with its two answers, the left one first.

    result: what the page shows after the vote
    """

    messages: Sequence[Message]
    sampling: Mapping[str, Any]
    sides: Sequence[Side]
    task: asyncio.Task[None] | None = None
    problem: str | None = None
    is_voted: bool = False
    result: dict[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_done(self) -> bool:
        """Whether both answers have ended, or failed."""
        return self.problem is not None or all(side.choice.finish is not None for side in self.sides)

    def publish(self) -> None:
        """Wake all readers."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def events(self) -> AsyncIterator[str]:
        """Yield the text of both answers as it grows, from its start, and at last how the round ended."""
        sent = [0] * len(self.sides)
        while True:
            changed, is_done = self.changed, self.is_done
            for index, side in enumerate(self.sides):
                text = side.choice.content[sent[index] :]
                sent[index] += len(text)
                if text:
                    yield event({"side": index, "text": text})
            if is_done:
                yield event({"done": True, "problem": self.problem, "result": self.result})
                return
            if changed is self.changed:
                await changed.wait()


class Arena:
    """The rounds between two models, and the routes of the page."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        contestants: Sequence[Contestant],
        votes: VoteFile,
        batcher: Batcher,
    ) -> None:
        self._models, self._contestants, self._batcher, self._votes = models, contestants, batcher, votes
        self._rounds: dict[str, Round] = {}

    def routes(self) -> list[Route]:
        """Return the routes of the page's requests."""
        return [
            Route("/arena", self.show_tally),
            Route("/arena/rounds", self.start, methods=["POST"]),
            Route("/arena/rounds/{name}", self.follow),
            Route("/arena/votes", self.vote, methods=["POST"]),
        ]

    async def show_tally(self, _: Request) -> Response:
        return JSONResponse(await self._tally())

    async def start(self, request: Request) -> Response:
        """Start the answers to one prompt, and return the name of the round."""
        fields = await read_json(request)
        body = parse(ChatRequest, fields)
        unknown = sorted(set(fields) - ROUND_FIELDS)
        if unknown:
            raise ServeError(400, f"{unknown[0]}: there is no such field", param=unknown[0])
        order = [0, 1] if secrets.randbelow(2) else [1, 0]
        for index in order:
            self._batcher.check_waiting(self._models[index].name)
        jobs = {i: (await asyncio.to_thread(self._models[i].chat_jobs, body))[0] for i in order}
        sides = [Side(i, jobs[i], self._models[i].choice(body)) for i in order]
        sampling = {name: value for name, value in fields.items() if name != "messages"}
        played = Round(body.turns(), sampling, sides)
        name = secrets.token_urlsafe(16)
        self._rounds[name] = played
        played.task = asyncio.create_task(self._play(played))
        if len(self._rounds) > MOST_ROUNDS:
            self._forget(next(iter(self._rounds)))
        return JSONResponse({"round": name}, 201)

    async def follow(self, request: Request) -> Response:
        """Stream a round from its start."""
        events = self._round(request.path_params["name"]).events()
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def vote(self, request: Request) -> Response:
        """Store a vote; return the names of both sides and the win rate."""
        body = parse(VoteRequest, await read_json(request))
        played = self._round(body.round)
        if not played.is_done or played.problem is not None:
            raise ServeError(409, "this round has no complete answers to vote on")
        left, right = (side.choice.content.strip() for side in played.sides)
        if body.vote in SIDES and left == right:
            raise ServeError(409, "both answers are equal; vote for both or for neither")
        if played.is_voted:
            raise ServeError(409, "this round has a vote already; send another message to start a new round")
        played.is_voted = True
        try:
            await asyncio.to_thread(self._votes.append, self._row(played, body))
        except OSError as problem:
            played.is_voted = False
            raise ServeError(500, f"the vote cannot be written ({problem.strerror}); vote again") from problem
        names = [self._contestants[side.index].name for side in played.sides]
        played.result = {"vote": body.vote, "names": names}
        return JSONResponse(played.result | {"tally": await self._tally()})

    def _row(self, played: Round, body: VoteRequest) -> dict[str, Any]:
        left, right = (side.choice.content for side in played.sides)
        casts = [self._contestants[side.index].cast(side.choice.content) for side in played.sides]
        return {
            "prompt": [message.to_row() for message in played.messages],
            **preference(body.vote, left, right),
            "vote": body.vote,
            "comment": body.comment,
            "left": casts[0],
            "right": casts[1],
            "sampling": played.sampling,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    async def _tally(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._votes.tally, *self._contestants)

    async def _play(self, played: Round) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for side in played.sides:
                    group.create_task(self._answer(played, side))
        except* ServeError as problems:
            played.problem = str(problems.exceptions[0])
            played.publish()

    async def _answer(self, played: Round, side: Side) -> None:
        model = self._models[side.index].name
        async with aclosing(self._batcher.stream(model, [side.job])) as tokens:
            async for _, token in tokens:
                side.choice.take(token)
                played.publish()

    def _round(self, name: str) -> Round:
        if name not in self._rounds:
            raise ServeError(404, "the server does not have this round any more; send the message again")
        return self._rounds[name]

    def _forget(self, name: str) -> None:
        task = self._rounds.pop(name).task
        if task is not None:
            task.cancel()
