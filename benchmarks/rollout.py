"""Useful tokens per second of our generator against transformers' `generate`: random weights, on the CPU.

    equal, single    OPT-125M shape, prompts and answers of 128 tokens: 16 prompts or one
    ragged           64 prompts of 16 to 256 tokens, answers of 8 to 256 tokens; the lengths are sampled in advance
    tiny             32 prompts on a model of two layers
    samples          8 answers to one prompt
    zero3            the prompts of ragged on two ranks under ZeRO-3; the peer gathers each layer for each token
    flip             seconds of the flip between training and generation on two ranks, as a share of the rollout
    release          resident memory after a flip that frees its memory, against the memory before
    ppo              one iteration of PPO

Useful tokens are the tokens up to the end of each answer. `generate` processes the prompts in their order, in batches
of as many as our generator has slots, and decodes each batch to its longest answer. It uses its dynamic or its static
cache, whichever is faster on the first batch. In `samples` the peer is our own generator with as many prompts that have
no common beginning. The peer of `ppo` is transformers with plain PyTorch.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import cpu_precision
from benchmarks.measure import in_turn, median, spread
from benchmarks.record import Result
from engine import Generator, Sampling

OTHER_MODULES = {
    "zero3": "benchmarks.rollout_flip",
    "flip": "benchmarks.rollout_flip",
    "release": "benchmarks.rollout_flip",
    "ppo": "benchmarks.rollout_ppo",
}
CASES = ("equal", "ragged", "single", "tiny", "samples", *OTHER_MODULES)
CACHES = ("dynamic", "static")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OPT_125M: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}
TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 32,
    "intermediate_size": 1024,
    "vocab_size": 800,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


@dataclass(frozen=True)
class Work:
    """The shape of the model, the prompts, the length of each answer, and the number of slots."""

    shape: Mapping[str, Any]
    prompts: list[list[int]]
    lengths: list[int]
    slots: int


@dataclass
class Lengths:
    """A stop function that ends each answer at its length."""

    lengths: Sequence[int]
    counts: dict[int, int] = field(default_factory=dict)

    def __call__(self, answer: int, token: int) -> bool:
        self.counts[answer] = self.counts.get(answer, 0) + 1
        return self.counts[answer] == self.lengths[answer]


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Measure `cases`. Our side and the peer alternate."""
    for case in cases:
        measure = importlib.import_module(OTHER_MODULES[case]).measure if case in OTHER_MODULES else _measure
        yield measure(case, rounds)


def work(case: str) -> Work:
    """Return the work of a case, the same at each call."""
    generator = torch.Generator().manual_seed(0)

    def prompts(shape: Mapping[str, Any], lengths: Sequence[int]) -> list[list[int]]:
        return [torch.randint(10, shape["vocab_size"], (n,), generator=generator).tolist() for n in lengths]

    if case == "equal":
        return Work(OPT_125M, prompts(OPT_125M, [128] * 16), [128] * 16, 16)
    if case == "single":
        return Work(OPT_125M, prompts(OPT_125M, [128]), [128], 1)
    if case == "tiny":
        return Work(TINY, prompts(TINY, [32] * 32), [64] * 32, 32)
    if case == "samples":
        return Work(OPT_125M, prompts(OPT_125M, [256]) * 8, [32] * 8, 8)
    prompt_lengths = torch.randint(16, 257, (64,), generator=generator).tolist()
    lengths = torch.rand(64, generator=generator).log().neg() * 62 + 8  # exponential: most answers are short
    return Work(OPT_125M, prompts(OPT_125M, prompt_lengths), lengths.clamp(8, 256).round().int().tolist(), 16)


def _measure(case: str, rounds: int) -> Result:
    task = work(case)
    torch.manual_seed(0)
    fields = dict(task.shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[cpu_precision()]).eval()
    module.generation_config.eos_token_id = None  # only the work's lengths end answers
    plain = deepcopy(module)  # our generator moves the weights of its module to huge pages
    generator = Generator(module, "cpu")
    ours = partial(_rate, task, partial(_ours, generator, task))
    ours()  # the first run includes allocations
    peer, detail = _against_separate(generator, task) if case == "samples" else _against_generate(plain, task)
    calls: dict[str, Callable[[], float]] = {"ours": ours, "peer": peer}
    rates = in_turn(calls, rounds)
    return Result(
        bench="rollout",
        case=case,
        ours=median(rates["ours"]),
        unit="useful tokens/s",
        lower_is_better=False,
        peer=median(rates["peer"]),
        detail={
            "dtype": cpu_precision(),
            "threads": torch.get_num_threads(),
            **detail,
            "spread": spread(rates["ours"]),
            "spread_peer": spread(rates["peer"]),
        },
    )


def _against_generate(module: nn.Module, task: Work) -> tuple[Callable[[], float], dict[str, Any]]:
    """Return the rate of `generate` with the faster cache. Each cache runs the first batch twice."""
    first = Work(task.shape, task.prompts[: task.slots], task.lengths[: task.slots], task.slots)
    rates = {cache: max(_rate(first, partial(_generate, module, first, cache)) for _ in "12") for cache in CACHES}
    cache = max(rates, key=lambda name: rates[name])
    return partial(_rate, task, partial(_generate, module, task, cache)), {"generate_cache": cache}


def _against_separate(generator: Generator, task: Work) -> tuple[Callable[[], float], dict[str, Any]]:
    """Return the rate of our generator on prompts of the same lengths without a common beginning."""
    source = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(10, task.shape["vocab_size"], (len(prompt),), generator=source).tolist()
        for prompt in task.prompts
    ]
    other = Work(task.shape, prompts, task.lengths, task.slots)
    return partial(_rate, other, partial(_ours, generator, other)), {"new_tokens": max(task.lengths)}


def _rate(task: Work, generate: Callable[[], None]) -> float:
    start = perf_counter()
    generate()
    return sum(task.lengths) / (perf_counter() - start)


def _ours(generator: Generator, task: Work) -> None:
    generator.refresh()  # as each flip does
    sampling = Sampling(max(task.lengths))
    sample_seeds = list(range(len(task.prompts)))
    steps = generator.run(task.prompts, sampling, sample_seeds, task.slots, Lengths(task.lengths))
    count = sum(len(step) for step in steps)
    assert count == sum(task.lengths), f"{count} tokens were generated, not {sum(task.lengths)}"


def _generate(module: nn.Module, task: Work, cache: str) -> None:
    """Run transformers' `generate` on each batch, padded on the left."""
    for first in range(0, len(task.prompts), task.slots):
        prompts = task.prompts[first : first + task.slots]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output: Tensor = module.generate(  # type: ignore[operator, assignment]
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(task.lengths[first : first + task.slots]),
                cache_implementation="static" if cache == "static" else None,
                pad_token_id=0,
                disable_compile=True,
            )
        assert output.shape[1] == width + max(task.lengths[first : first + task.slots])
