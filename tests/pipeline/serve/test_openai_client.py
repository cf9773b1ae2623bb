"""The server with OpenAI's client: answers, streams, concurrent clients, refusals."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from engine import Sampling
from pipeline.chat.folder import ChatModel
from pipeline.chat.participant import ChatParticipant, load
from pipeline.data.records import Message, messages_of
from pipeline.data.tool_calls import with_tools
from pipeline.serve.app import create_app
from pipeline.serve.command import Listener
from pipeline.serve.models import ServedModel
from tests.pipeline.serve.running import client_of, served
from tests.test_chat import save_model

HELLO = [{"role": "user", "content": "hello"}]
Options = dict[str, Any]


@pytest.fixture(scope="module")
def url(models: dict[str, ServedModel]) -> Iterator[str]:
    with served(create_app(models, key=None)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ChatParticipant:
    """Load the model "ppo" again, to answer single prompts without a server."""
    folder = tmp_path_factory.mktemp("alone") / "ppo"
    save_model(folder, 0)
    return load(ChatModel("ppo", folder))


ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


def ask(client: openai.OpenAI, text: str = "hello", **options: Any) -> Any:
    fields = {"model": "ppo", "max_tokens": 20} | options
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **fields)


def expected(alone: ChatParticipant, text: str, sampling: Sampling) -> tuple[str, int]:
    """Return the text and the number of tokens of an answer that is decoded alone."""
    prompt = alone.tokenizer.encode_prompt([Message("user", text)])
    answer = alone.rollouts.generate([prompt], sampling, [0])[0]
    return alone.tokenizer.decode(answer.token_ids), len(answer.token_ids)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [(model.id, model.object) for model in client.models.list()] == [("ppo", "model"), ("sft", "model")]
    assert client.models.retrieve("sft").id == "sft"
    with pytest.raises(openai.NotFoundError, match="there is no model x; this server has ppo, sft"):
        client.models.retrieve("x")


def test_an_answer_equals_that_of_the_generator(client: openai.OpenAI, alone: ChatParticipant) -> None:
    ends = alone.tokenizer.end_ids
    answer = ask(client, seed=5, temperature=0.7, top_p=0.9)
    text, count = expected(alone, "hello", Sampling(20, 0.7, top_p=0.9, end_ids=ends, seed=5))
    assert answer.choices[0].message.content == text != ""
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    prompt = len(alone.tokenizer.encode_prompt([Message("user", "hello")]))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, count)
    assert answer.usage.total_tokens == prompt + count and answer.model == "ppo"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert ask(client, seed=5, temperature=0.7, top_p=0.9, model="sft").choices[0].message.content != text


def test_empty_messages_of_clients_are_accepted(client: openai.OpenAI) -> None:
    """An empty system message counts as none, and an empty answer stays a turn of the conversation."""
    fields: Options = {"model": "ppo", "max_tokens": 20, "seed": 5}
    turns: Any = [*HELLO, {"role": "assistant", "content": ""}, *HELLO]
    answers = [
        client.chat.completions.create(messages=messages, **fields).usage.prompt_tokens
        for messages in ([{"role": "system", "content": " "}, *HELLO], HELLO, turns, [*HELLO, *HELLO])
    ]
    assert answers[0] == answers[1] < answers[3] < answers[2]
    with pytest.raises(openai.BadRequestError, match="no messages"):
        client.chat.completions.create(messages=[{"role": "system", "content": ""}], **fields)


def test_a_stream_has_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    full = ask(client, seed=3)
    chunks = list(ask(client, seed=3, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert last.choices == [] and last.usage == full.usage
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == full.choices[0].message.content
    assert len([piece for piece in pieces if piece.choices[0].delta.content]) > 5
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [
        full.choices[0].finish_reason
    ]
    assert len({chunk.id for chunk in chunks}) == 1 and pieces[0].usage is None


def test_many_clients_share_batches_and_get_their_own_answers(
    url: str, models: dict[str, ServedModel], alone: ChatParticipant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads, each with its own connection, text and settings."""
    sizes: list[int] = []
    session = models["ppo"].session
    step = session.step

    def counted() -> Any:
        tokens = step()
        sizes.append(len(tokens))
        return tokens

    monkeypatch.setattr(session, "step", counted)

    def one(number: int) -> str:
        with client_of(url) as own:
            options: Options = {"seed": number, "temperature": 0.5 + number / 20, "max_tokens": 40}
            if number % 2:
                stream = ask(own, f"hello {number}", stream=True, **options)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return str(ask(own, f"hello {number}", **options).choices[0].message.content)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    ends = alone.tokenizer.end_ids
    for number, answer in enumerate(answers):
        sampling = Sampling(40, 0.5 + number / 20, end_ids=ends, seed=number)
        assert answer == expected(alone, f"hello {number}", sampling)[0]
    assert sum(sizes) > len(sizes), "no step decoded two answers"


def test_stop_strings_are_cut_off(client: openai.OpenAI) -> None:
    full = ask(client, seed=3).choices[0].message.content
    stop = full[3:6]
    for options in ({}, {"stream": True}):
        answer = ask(client, seed=3, stop=[stop, "never"], **options)
        if options:
            chunks = list(answer)
            text, finish = (
                "".join(c.choices[0].delta.content or "" for c in chunks),
                chunks[-1].choices[0].finish_reason,
            )
        else:
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert text == full[: full.index(stop)] and finish == "stop"
    assert ask(client, seed=3, max_tokens=2).choices[0].finish_reason == "length"
    least: Options = {"seed": 3, "extra_body": {"min_tokens": 20}}  # all tokens: no stop string ends the answer
    longest = ask(client, **least).choices[0].message.content
    assert ask(client, stop=longest[3:6], **least).choices[0].message.content == longest


def test_a_stop_string_with_half_a_character_is_accepted(url: str) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4, "stop": "\ud83d"}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert json.load(urllib.request.urlopen(request))["choices"]


def test_several_choices_differ_and_repeat(client: openai.OpenAI) -> None:
    first, second = (ask(client, n=3, seed=9) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert [choice.message.content for choice in second.choices] == texts
    assert ask(client, seed=9).choices[0].message.content == texts[0]
    assert len({ask(client).choices[0].message.content for _ in range(3)}) > 1, "without a seed answers vary"


def test_log_probabilities_are_those_of_the_model(client: openai.OpenAI, alone: ChatParticipant) -> None:
    answer = ask(client, seed=3, temperature=0.3, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    prompt = alone.tokenizer.encode_prompt([Message("user", "hello")])
    sampling = Sampling(20, 0.3, end_ids=alone.tokenizer.end_ids, seed=3)
    ids = alone.rollouts.generate([prompt], sampling, [0])[0].token_ids
    with torch.no_grad():
        logits = alone.rollouts.module(torch.tensor([prompt + ids]), use_cache=False).logits[0].double()
    plain = logits[len(prompt) - 1 : -1].log_softmax(-1)
    assert [entry.logprob for entry in entries] == pytest.approx(
        [float(row[token]) for row, token in zip(plain, ids, strict=True)], abs=1e-4
    )
    best = plain.topk(2).values.tolist()
    for entry, values in zip(entries, best, strict=True):
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(values, abs=1e-4)
    assert [entry.token for entry in entries] == [alone.tokenizer.hf.decode([token]) for token in ids]
    streamed = ask(client, seed=3, temperature=0.3, logprobs=True, top_logprobs=2, stream=True)
    in_chunks = [each for c in streamed if c.choices[0].logprobs for each in c.choices[0].logprobs.content]
    assert in_chunks == entries


def test_completions_of_texts_and_of_token_ids(client: openai.OpenAI, alone: ChatParticipant) -> None:
    ids = alone.tokenizer.hf("hello there")["input_ids"]
    options: Options = {"model": "ppo", "max_tokens": 9, "temperature": 0}
    by_text = client.completions.create(prompt="hello there", **options)
    by_ids = client.completions.create(prompt=ids, **options)
    several = client.completions.create(prompt=["good morning", "hello there"], n=2, logprobs=2, **options)
    full = alone.rollouts.generate([ids], Sampling(9, 0, end_ids=alone.tokenizer.end_ids), [0])[0]
    assert by_text.choices[0].text == by_ids.choices[0].text == alone.tokenizer.decode_unstripped(full.token_ids)
    assert [choice.text for choice in several.choices[2:]] == [by_text.choices[0].text] * 2
    assert len(several.choices) == 4 and several.usage is not None
    assert several.usage.prompt_tokens == len(ids) + len(alone.tokenizer.hf("good morning")["input_ids"])
    logprobs = several.choices[2].logprobs
    assert logprobs is not None and logprobs.token_logprobs == pytest.approx(full.logprobs, abs=1e-4)
    streamed = client.completions.create(prompt="hello there", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_text.choices[0].text


@pytest.mark.parametrize("count", [0, 2])
def test_the_log_probabilities_of_a_completion_have_the_sampled_token(client: openai.OpenAI, count: int) -> None:
    """OpenAI's reference of the field: the API always returns the log-probability of the sampled token."""
    options: Options = {"max_tokens": 40, "temperature": 2, "seed": 1, "logprobs": count}
    answer = client.completions.create(model="ppo", prompt="hello", **options)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    for token, logprob, likeliest in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert likeliest[token] == logprob and len(likeliest) <= count + 1
    assert any(len(likeliest) == count + 1 for likeliest in found.top_logprobs)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[1]] * 100, "100 prompts with n=20 are more than 1024 answers"),  # a body may have millions of prompts
        ([[1], []], "prompt: empty; send at least one token"),
        ([], "prompt: empty; send at least one token"),
        ([1.5], "send a text, a list of token ids"),
        ([[True]], "send a text, a list of token ids"),
        ({"a": 1}, "send a text, a list of token ids"),
        ([10**9], "token ids must be below 300"),
    ],
)
def test_unusable_prompts_are_refused(client: openai.OpenAI, prompt: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(model="ppo", prompt=prompt, n=20, max_tokens=1)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": 1e-300}, "temperature", "0 (greedy) or a number from 1e-05"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5000}, "max_tokens", "tokens remain after this prompt"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "is not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "a tool has no name"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "is not supported"),
        ({"functions": [ADD["function"]]}, "functions", "is not supported"),
        ({"temprature": 1}, "temprature", "there is no such field"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "stream_options.x: there is no such field"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages", "assistant"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages", "of the role 'robot'"),
        ({"messages": [{"role": "user", "content": "good morning " * 400}]}, None, "has a context of 256 tokens"),
        ({"seed": "x"}, "seed", "valid integer"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"stop": ["x"] * 65}, "stop", "65 texts are more than 64"),
        ({"n": 1000}, "n", "less than or equal to 128"),
    ],
)
def test_a_wrong_field_is_named(client: openai.OpenAI, fields: Options, param: str | None, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="ppo", messages=HELLO, extra_body=fields)  # type: ignore[call-overload]
    assert message in caught.value.body["message"] and caught.value.param == param  # type: ignore[index]
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_fields_of_the_answer(
    stream: bool, client: openai.OpenAI, models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of the tokens are replaced, so that the answer is a call up to the stop string.

    An argument has half of an escaped character, which cannot be sent.
    """
    text = 'I add. <tool_call>{"name": "add", "arguments": {"a": "2\\ud83d"}}</tool_call>#'
    texts = ["", "I", text]
    monkeypatch.setattr(models["ppo"].tokenizer, "decode_unstripped", lambda ids: texts[min(len(ids), 2)])
    fields: Options = {"tools": [ADD], "stop": "#", "stream": stream}
    answer = ask(client, **fields)
    pieces = list(answer) if stream else [answer]
    assert len(pieces) == 1 + stream  # the start of a stream, and the answer
    choice = pieces[-1].choices[0]
    message = choice.delta if stream else choice.message
    assert (message.content, choice.finish_reason) == ("I add.", "tool_calls")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments, call.type) == ("add", '{"a": "2\ufffd"}', "function")
    assert call.id.startswith("call_") and (not stream or call.index == 0)
    without = ask(client, stop="#").choices[0]
    assert without.message.content == text[:-1] and without.message.tool_calls is None
    unused = ask(client, **fields | {"tool_choice": "none", "stream": False})
    assert unused.choices[0].finish_reason == "stop"
    assert unused.usage.prompt_tokens == ask(client, stop="#").usage.prompt_tokens  # without the tools


def test_the_prompt_has_the_tools_and_the_results(client: openai.OpenAI, alone: ChatParticipant) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    turns: list[Any] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    answer = client.chat.completions.create(model="ppo", messages=turns, tools=[ADD], max_tokens=4)  # type: ignore[call-overload]
    ids = alone.tokenizer.encode_prompt(with_tools(messages_of(turns), [ADD]))
    text = alone.tokenizer.hf.decode(ids)
    assert answer.usage.prompt_tokens == len(ids) and '{"name": "add"}' in text and '"arguments": {"a": 2}' in text
    plain = client.chat.completions.create(model="ppo", messages=turns, max_tokens=4)
    assert plain.usage is not None and plain.usage.prompt_tokens < len(ids)


def test_fields_without_an_effect_are_accepted(client: openai.OpenAI) -> None:
    neutral: Options = {"user": "me", "metadata": {"a": "b"}, "frequency_penalty": 0, "tools": [], "stop": None}
    neutral |= {"top_k": -1, "top_logprobs": 0, "stream_options": {"include_obfuscation": False}}
    neutral |= {"prompt_cache_options": {"ttl": "30m"}, "prediction": {"type": "content", "content": "hello"}}
    assert ask(client, seed=1, extra_body=neutral).choices == ask(client, seed=1).choices


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b'{"messages": "hello"}', "application/json", 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "\\ud800": 1}', "application/json", 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "model": "\\ud800"}', "application/json", 404),
        (b" " * (8 * 2**20 + 1), "application/json", 413),
    ],
)
def test_a_broken_body_is_an_error_in_json(url: str, content: bytes, kind: str, status: int) -> None:
    request = urllib.request.Request(f"{url}/v1/chat/completions", content, {"Content-Type": kind})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == status and json.load(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/models", 404, "GET /models: Not Found; the API has /v1/chat/completions"),  # a base_url without /v1
        ("/v1/chat/completions", 405, "GET /v1/chat/completions: Method Not Allowed"),
    ],
)
def test_wrong_paths_and_methods_are_errors_in_json(url: str, path: str, status: int, message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url + path)
    assert caught.value.code == status and json.load(caught.value)["error"]["message"].startswith(message)


def test_only_loopback_names_reach_a_server_without_a_key(url: str) -> None:
    """A page may point its own name at this machine (DNS rebinding)."""
    port = url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost"):
        assert urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers={"Host": host})).status == 200
    for host in (f"evil.example:{port}", f"localhost.evil.example:{port}", ""):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers={"Host": host}))
        assert caught.value.code in (400, 403)


def test_a_server_with_a_key_refuses_others(models: dict[str, ServedModel]) -> None:
    with served(create_app(models, key="sésame")) as url:
        for wrong in ("none", "sesame", "sésamé"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                client_of(url, wrong).models.list()
        for header in ("Bearer sésame", "bearer  sésame"):  # HTTP ignores the case of the scheme
            request = urllib.request.Request(
                f"{url}/v1/models", headers={"Authorization": header.encode().decode("latin-1")}
            )
            assert urllib.request.urlopen(request).status == 200
        assert urllib.request.urlopen(f"{url}/health").status == 200
        policy = urllib.request.urlopen(url).headers["Content-Security-Policy"]  # of the page, which has no secrets
        assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_clients_close_idle_connections_before_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a request on an idle connection can meet its end."""
    found: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: found.append(server.config))
    Listener("127.0.0.1", 0, None).run(create_app({}, key=None), "")
    (config,) = found
    assert config.timeout_keep_alive > 2 * (httpx.Limits().keepalive_expiry or 0)
