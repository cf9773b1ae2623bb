"""The bodies of requests, in the form of OpenAI's API, and the sampling settings that they stand for.

Fields that change the answer and that the server does not support are refused, and so are unknown fields: a client must
not get an answer to another question. Fields that only annotate a request are ignored.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from engine import Sampling
from pipeline.data.records import BadRow, Message, in_order, message_of, replace_surrogates
from pipeline.data.tool_calls import with_tools
from pipeline.serve.errors import ServeError

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction"),  # for speed only
)
LARGEST_BODY = 8 * 2**20  # bytes
MAX_CHOICES = 128
MOST_ANSWERS = 1024  # of a request with several prompts
MOST_STOPS = 64  # the decoding thread searches each stop string after each token
# Fields that are accepted only with these values, which have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
Body = TypeVar("Body", bound=BaseModel)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SharedFields(BaseModel):
    """The fields that both endpoints have. `top_k`, `min_p`, `repetition_penalty` and `min_tokens` are extensions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] = []
    top_k: int = Field(0, ge=-1)  # -1 is vLLM's other name of 0
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(replace_surrogates(text) for text in stop if text)

    @property
    def limit(self) -> int | None:
        """The largest number of new tokens, if the request sets it."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest tokens to return with each token; None without log-probabilities."""
        raise NotImplementedError

    def sampling(self, room: int, end_ids: tuple[int, ...]) -> Sampling:
        """Return the settings of the sampler for an answer of at most `room` tokens.

        Raises ServeError if the sampler refuses a setting.
        """
        longest = room if self.limit is None else self.limit
        if longest > room:
            raise ServeError(
                400,
                f"max_tokens={longest} is too large: {room} tokens remain after this prompt; set a smaller max_tokens",
                "context_length_exceeded",
                "max_tokens",
            )
        if len(self.stops) > MOST_STOPS:
            raise ServeError(400, f"stop: {len(self.stops)} texts are more than {MOST_STOPS}; send fewer", param="stop")
        try:
            return Sampling(
                max_new_tokens=longest,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(self.top_k, 0),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                min_new_tokens=min(self.min_tokens, longest),
                stop=self.stops,
                seed=secrets.randbits(62) if self.seed is None else self.seed,
                end_ids=end_ids,
                top_logprobs=self.likeliest,
            )
        except ValueError as problem:
            raise ServeError(400, str(problem), param=str(problem).partition(" ")[0]) from problem


class ChatRequest(SharedFields):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ServeError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def turns(self) -> tuple[Message, ...]:
        """Return the conversation. Raises ServeError if it cannot be answered.

        Clients send an answer of the model that was empty.
        """
        try:
            messages = in_order(
                [Message("assistant", "") if _is_empty_answer(each) else message_of(each) for each in self.messages]
            )
        except BadRow as problem:
            raise ServeError(400, f"messages: {problem}", param="messages") from problem
        if messages[-1].role not in ("user", "tool"):
            raise ServeError(400, f"messages: the last message is from the {messages[-1].role}; end with a user's",
                             param="messages")  # fmt: skip
        try:
            return with_tools(messages, self.tools) if self.may_call else messages
        except BadRow as problem:
            raise ServeError(400, f"tools: {problem}", param="tools") from problem

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice == "auto"


class CompletionRequest(SharedFields):
    """The body of POST /v1/completions. A prompt is a text or token ids; several prompts are a list."""

    prompt: Any  # pydantic needs half a minute for millions of prompts, and the server waits
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Raises ServeError for other values, for an empty prompt, and for too many answers."""
        is_single = isinstance(self.prompt, str) or _are_token_ids(self.prompt)
        prompts = [self.prompt] if is_single else self.prompt
        if isinstance(prompts, list) and len(prompts) * self.n > MOST_ANSWERS:
            problem = (
                f"{len(prompts)} prompts with n={self.n} are more than {MOST_ANSWERS} answers; send several requests"
            )
        elif not isinstance(prompts, list) or not all(isinstance(p, str) or _are_token_ids(p) for p in prompts):
            problem = "send a text, a list of token ids, or a list of texts or of lists of token ids"
        elif not all(prompts):
            problem = "empty; send at least one token"
        else:
            return [replace_surrogates(each) if isinstance(each, str) else each for each in prompts]
        raise ServeError(400, f"prompt: {problem}", param="prompt")


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


async def read_json(request: Request) -> Any:
    """Return the JSON body of a request. Raises ServeError for other content.

    A content type other than JSON is refused, because a web page of another site may send such requests.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ServeError(415, "send JSON with the header Content-Type: application/json")
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > LARGEST_BODY:
                raise ServeError(413, f"the body is larger than {LARGEST_BODY} bytes")
    except ClientDisconnect as problem:  # nobody reads the answer
        raise ServeError(499, "the client disconnected") from problem
    try:
        return json.loads(bytes(content))
    except (ValueError, RecursionError) as problem:
        raise ServeError(400, "the body is not valid JSON") from problem


def parse(kind: type[Body], content: Any) -> Body:
    """Return the body of a request. A field with the value null counts as absent.

    Raises ServeError that names the wrong field and what it may be.
    """
    if not isinstance(content, Mapping):
        raise ServeError(400, "the body must be a JSON object")
    fields = {key: value for key, value in content.items() if value is not None and key not in IGNORED}
    for key, neutral in NEUTRAL.items():
        if key in fields and key not in kind.model_fields:
            value = fields.pop(key)
            if value not in neutral:
                raise ServeError(400, f"{key} is not supported; leave it out", "unsupported_parameter", key)
    try:
        return kind.model_validate(fields)
    except ValidationError as problem:
        raise _first_error(problem.errors()) from problem


def _first_error(errors: Sequence[Any]) -> ServeError:
    """Return the error of the first wrong field. An unknown field has its full name, such as stream_options.x."""
    error = errors[0]
    is_unknown = error["type"] == "extra_forbidden"
    name = ".".join(map(str, error["loc"] if is_unknown else error["loc"][:1])) or "the body"
    return ServeError(400, f"{name}: {'there is no such field' if is_unknown else error['msg']}", param=name)


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer with neither text nor calls."""
    content, others = message.get("content"), message.keys() - {"role", "content", "name", "refusal"}
    is_blank = content is None or (isinstance(content, str) and not content.strip())
    return message.get("role") == "assistant" and is_blank and not any(message[key] for key in others)
