"""The web application: routes, keys, errors, and clients that disconnect."""

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.serve.answers import CHAT, COMPLETION, Choice, Endpoint, event, usage
from pipeline.serve.arena import Arena
from pipeline.serve.batcher import Batcher, Job
from pipeline.serve.command import LOOPBACK
from pipeline.serve.errors import ServeError
from pipeline.serve.models import ServedModel
from pipeline.serve.requests import ChatRequest, CompletionRequest, SharedFields, parse, read_json

OPEN_PATHS = ("/", "/health")  # the page has no secrets; its requests send the key
FOLDER = Path(__file__).parent


def create_app(
    models: Mapping[str, ServedModel],
    *,
    key: str | None,
    arena: Callable[[Batcher], Arena] | None = None,
) -> Starlette:
    """Return the application. The first model answers requests that name none.

    key: what clients must send as bearer token. Without a key, the server accepts requests to loopback names only.
    arena: creates the arena, whose page replaces the chat page
    """
    batcher = Batcher({name: model.session for name, model in models.items()})
    api = _Api(models, batcher)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with suppress(asyncio.CancelledError):  # a second Ctrl-C; uvicorn would log a traceback
            async with batcher:
                yield

    return Starlette(
        routes=[
            Route("/", page("chat" if arena is None else "arena")),
            Route("/health", api.health),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.get_model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
            *(arena(batcher).routes() if arena is not None else ()),
        ],
        middleware=[Middleware(_Shutdown), Middleware(_Guard, key=key)],
        exception_handlers=dict.fromkeys((ServeError, HTTPException, Exception), _error),
        lifespan=lifespan,
    )


class _Api:
    """The handlers of the routes.

    Prompts are tokenized in threads, because the chat template of a long conversation may take many seconds.
    """

    def __init__(self, models: Mapping[str, ServedModel], batcher: Batcher) -> None:
        self.models, self.batcher = models, batcher
        self.started = int(time.time())

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.models]})

    async def get_model(self, request: Request) -> Response:
        return JSONResponse(self._described(self._model(request.path_params["name"]).name))

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, await read_json(request))
        model = self._model(body.model)
        return await self._respond(request, CHAT, model, body, await asyncio.to_thread(model.chat_jobs, body))

    async def complete(self, request: Request) -> Response:
        body = parse(CompletionRequest, await read_json(request))
        model = self._model(body.model)
        return await self._respond(
            request, COMPLETION, model, body, await asyncio.to_thread(model.completion_jobs, body)
        )

    async def _respond(
        self, request: Request, endpoint: Endpoint, model: ServedModel, body: SharedFields, jobs: Sequence[Job]
    ) -> Response:
        """Answer at once, or as a stream of events."""
        self.batcher.check_waiting(model.name)
        choices = [model.choice(body) for _ in jobs]
        prompt_tokens = sum(len(job.prompt) for job in jobs) // body.n
        if body.stream:
            events = self._events(endpoint, model, body, jobs, choices, prompt_tokens)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        await until_disconnected(request, self._collect(model, jobs, choices))
        content = endpoint.head(model.name, chunk=False) | {
            "choices": [endpoint.full(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(prompt_tokens, choices),
        }
        return JSONResponse(content)

    async def _collect(self, model: ServedModel, jobs: Sequence[Job], choices: Sequence[Choice]) -> None:
        async with aclosing(self.batcher.stream(model.name, jobs)) as sampled:
            async for index, token in sampled:
                choices[index].take(token)

    async def _events(
        self,
        endpoint: Endpoint,
        model: ServedModel,
        body: SharedFields,
        jobs: Sequence[Job],
        choices: Sequence[Choice],
        prompt_tokens: int,
    ) -> AsyncIterator[str]:
        """Yield the events of a streamed answer. An error after the start is an event too."""
        head = endpoint.head(model.name, chunk=True)
        counts = body.stream_options.include_usage
        none: dict[str, Any] = {"usage": None} if counts else {}
        try:
            if endpoint.opening is not None:
                for index in range(len(choices)):
                    yield event(head | {"choices": [endpoint.opening(index)]} | none)
            async with aclosing(self.batcher.stream(model.name, jobs)) as sampled:
                async for index, token in sampled:
                    choice = choices[index]
                    text = choice.take(token)
                    if text or token.finish is not None or choice.entries:
                        yield event(head | {"choices": [endpoint.delta(index, choice, text)]} | none)
            if counts:
                yield event(head | {"choices": [], "usage": usage(prompt_tokens, choices)})
        except ServeError as problem:
            yield event(problem.body())
        yield "data: [DONE]\n\n"

    def _model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            raise ServeError(404, f"there is no model {name}; this server has {known}", "model_not_found", "model")
        return self.models[name]

    def _described(self, name: str) -> dict[str, Any]:
        fields = {"id": name, "object": "model", "created": self.started, "owned_by": "zerochat"}
        return fields | {"max_model_len": self.models[name].context}


class _Shutdown:
    """Middleware that sends an error to the clients whose requests the server cancels when it ends.

    uvicorn would log a traceback for each of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: Headers | None = None

        async def noted(message: Message) -> None:
            nonlocal headers
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            problem = ServeError(503, "the server has ended; start it and send the request again", "server_shutdown")
            if headers is None:
                await JSONResponse(problem.body(), problem.status)(scope, receive, send)
            elif headers.get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": event(problem.body()).encode()})


class _Guard:
    """Middleware that refuses requests without the key or, if there is no key, to names other than loopback.

    The check of the name stops a web page from reaching the server through a name of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self.app(scope, receive, send)
        else:
            await JSONResponse(problem.body(), problem.status)(scope, receive, send)

    def _problem(self, scope: Scope) -> ServeError | None:
        headers = Headers(scope=scope)
        if self.key is None:
            host = headers.get("host", "").rpartition("]")[0].lstrip("[") or headers.get("host", "").partition(":")[0]
            is_local = host in LOOPBACK
            return None if is_local else ServeError(403, f"{host}: this server answers to loopback names only")
        if scope["path"] in OPEN_PATHS:
            return None
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(sent.strip().encode("latin-1"), self.key.encode())  # starlette's encoding
        if is_right and scheme.lower() == "bearer":
            return None
        return ServeError(401, "the key is missing or wrong; send it as Authorization: Bearer KEY", "invalid_api_key")


def page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of a page. Its policy allows its own script and requests to this server, and nothing else."""
    text = (FOLDER / f"{name}.html").read_text(encoding="utf-8")
    for part in ("/* page.css */", "/* page.js */", "<!-- settings.html -->"):  # what both pages share
        text = text.replace(part, (FOLDER / part.split()[1]).read_text(encoding="utf-8"))
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    async def show(_: Request) -> Response:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})

    return show


async def until_disconnected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it if the client disconnects. Raises ServeError then, which nobody reads."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ServeError(499, "the client disconnected")
        task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _error(request: Request, problem: Exception) -> Response:
    """Answer an error. The log has the traceback of an error of the server itself, and the client gets none."""
    if isinstance(problem, HTTPException):  # an unknown path or method
        endpoints = "; the API has /v1/chat/completions, /v1/completions and /v1/models"
        hint = endpoints if problem.status_code == 404 else ""
        problem = ServeError(problem.status_code, f"{request.method} {request.url.path}: {problem.detail}{hint}")
    elif not isinstance(problem, ServeError):
        problem = ServeError(500, f"the server failed: {type(problem).__name__}")
    return JSONResponse(problem.body(), problem.status)
