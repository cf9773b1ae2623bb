"""Tokens per second of the server with 64 clients against an offline rollout of the same work: random weights, CPU.

The clients run in another process. Each client streams one request after another and reads the events without parsing
them: OpenAI's client takes 0.4 ms of a core for each event, more than the model. The peer is one call of
`Generator.generate` with the same prompts, the same lengths of answers and the same number of slots. The clients take a
share of the processor's cores, which the offline rollout has for itself.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import cpu_precision
from benchmarks.measure import BenchFailed, in_turn, median, spread
from benchmarks.record import Result
from benchmarks.rollout import DTYPES, OPT_125M, TINY
from engine import Generator, Sampling
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message
from pipeline.serve.app import create_app
from pipeline.serve.command import Listener
from pipeline.serve.models import ServedModel

CASES = ("tiny", "opt-125m")
CLIENTS, VOCABULARY, CONTEXT = 64, 800, 256
LIMIT = 900.0  # seconds for all requests of a round


@dataclass(frozen=True)
class Load:
    """The work of a case: the shape of the model, slots, requests per client, and tokens per answer."""

    shape: Mapping[str, Any]
    slots: int
    requests: int
    tokens: int


LOADS = {
    "tiny": Load(TINY, 64, 4, 64),
    "opt-125m": Load(OPT_125M | {"vocab_size": VOCABULARY}, 64, 1, 32),
}


def question(number: int) -> str:
    """Return the question of a request."""
    return f"question {number}: how are you today, and what is {number} + {number % 7}?"


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure `cases`. Server and offline rollout alternate."""
    for case in cases:
        yield _measure(case, LOADS[case], rounds)


def _measure(case: str, load: Load, rounds: int) -> Result:
    torch.manual_seed(0)
    fields = dict(load.shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[cpu_precision()]).eval()
    tokenizer = train_tokenizer([question(number) for number in range(500)], VOCABULARY)
    offline = Generator(module, "cpu")
    sampling = Sampling(load.tokens, end_ids=tokenizer.end_ids, min_new_tokens=load.tokens)
    prompts = tokenizer.encode_prompts([[Message("user", question(n))] for n in range(CLIENTS * load.requests)])

    def rollout() -> float:
        began = time.perf_counter()
        answers = offline.generate(prompts, sampling, range(len(prompts)), load.slots)
        return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began)

    session = Generator(module, "cpu").session(load.slots, CONTEXT, CONTEXT)
    app = create_app({"m": ServedModel("m", tokenizer, session, CONTEXT)}, key=None)
    listener = Listener("127.0.0.1", 0, None)
    # The thread ends with the process. Signals reach the main thread only, so the server does not handle them.
    threading.Thread(target=listener.run, args=(app, f"serving at {listener.url}"), daemon=True).start()
    first_token: list[float] = []
    rounds_of_questions = itertools.count()  # a session has the prompts of earlier rounds in its cache

    def through_server() -> float:
        first = next(rounds_of_questions) * CLIENTS * load.requests
        arguments = [listener.url, str(load.requests), str(load.tokens), str(first)]
        command = [sys.executable, "-m", "benchmarks.serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise BenchFailed(done.stderr[-2000:])
        figures = json.loads(done.stdout)
        first_token.append(figures["first_token_seconds"])
        return float(figures["tokens"] / figures["seconds"])

    rollout()
    through_server()  # the first runs include allocations
    rates = in_turn({"ours": through_server, "peer": rollout}, rounds)
    detail = {
        "against": "offline rollout",
        "clients": CLIENTS,
        "requests": len(prompts),
        "tokens per answer": load.tokens,
        "slots": load.slots,
        "median seconds to first token": median(first_token[1:]),
        "spread": spread(rates["ours"]),
    }
    return Result("serve", case, median(rates["ours"]), "tokens/s", False, median(rates["peer"]), detail)


async def drive(url: str, requests: int, tokens: int, first: int) -> dict[str, float]:
    """Send `requests` requests from each client; return tokens, seconds and the median time to the first token.

    `first` is the number of the first question.
    """
    delays: list[float] = []

    async def one_client(begin: int) -> int:
        return sum([await _send(url, number, tokens, delays) for number in range(begin, begin + requests)])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one_client(first + requests * index) for index in range(CLIENTS)))
    seconds = time.perf_counter() - began
    return {"tokens": sum(counts), "seconds": seconds, "first_token_seconds": median(delays)}


async def _send(url: str, number: int, tokens: int, delays: list[float]) -> int:
    """Stream one answer, add the seconds to its first token to `delays`, and return the number of its tokens."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": question(number)}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    began, waits, count = time.perf_counter(), True, 0
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if waits and b'"delta":{"content":' in line:
            delays.append(time.perf_counter() - began)
            waits = False
        if b'"completion_tokens":' in line:
            count = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
    writer.close()
    return count


if __name__ == "__main__":
    address, each, length, number = sys.argv[1:]
    print(json.dumps(asyncio.run(drive(address, int(each), int(length), int(number)))))
