"""The flip between training and generation, ZeRO-3 on 2 ranks: its share of a rollout, its benefit, its memory.

zero3: the ragged work on both ranks with 16 slots in total, flip included, against transformers' `generate` on the
FSDP2 module, which gathers each layer for each token. The peer needs minutes, so it runs once, on the first batch only
(8 prompts per rank). The detail has our rate with 16 slots per rank. flip: seconds of the flip in both directions as a
share of its rollout; a training step precedes each rollout. release: resident memory after a flip that frees all its
memory, compared with the memory before (RSS of Linux, shared pages included, after malloc_trim).
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.machine import cpu_precision
from benchmarks.measure import median, spread
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.rollout import DTYPES, OPT_125M, Lengths, Work, work
from engine import Engine, EngineConfig, OptimizerConfig
from engine.generation.generator import Generator
from engine.generation.sampling import Sampling
from engine.parallel import dist, dtensors

RANKS = 2
CASES = ("zero3", "flip", "release")
WARM_FLIPS = 2  # the first flips include parity checks and allocations


def measure(case: str, rounds: int) -> Result:
    """Run a case on its ranks, each in a process of its own."""
    first, *_ = run_ranks(__name__, [case, str(rounds), cpu_precision()], RANKS)
    return Result(bench="rollout", case=case, **first)


def main(case: str, rounds: int, precision: str) -> None:
    """Run a case on one rank; print the fields of its result as JSON."""
    torch.set_num_threads(1)
    dist.start("bench", device="cpu")
    figures = {"zero3": zero3, "flip": flip, "release": release}[case](rounds, precision)
    print(json.dumps(figures), flush=True)
    dist.stop()


def zero3(rounds: int, precision: str) -> dict[str, Any]:
    """Measure useful tokens per second of our generator and of the peer."""
    full, engine = work("ragged"), sharded(precision)
    task = replace(full, slots=full.slots // RANKS)
    for _ in range(WARM_FLIPS):
        rollout(engine, task)
    rates = [sum(task.lengths) / timed(lambda: rollout(engine, task)) for _ in range(rounds)]
    rollout(engine, full)  # allocates the larger cache
    rate_16_slots = sum(full.lengths) / timed(lambda: rollout(engine, full))
    peer = generate_sharded(task, precision)
    return {
        "ours": median(rates),
        "peer": peer,
        "unit": "useful tokens/s",
        "lower_is_better": False,
        "detail": {
            "ranks": RANKS,
            "threads": 1,
            "dtype": precision,
            "spread": spread(rates),
            "peer_cache": "dynamic",
            "ours_16_a_rank": rate_16_slots,
        },
    }


def flip(rounds: int, precision: str) -> dict[str, Any]:
    """Measure the flip's share of the seconds of flip and rollout, in per cent."""
    task, engine = work("ragged"), sharded(precision)
    rows = []
    for count in range(WARM_FLIPS + rounds):
        train(engine)
        total = timed(lambda: rollout(engine, task))
        if count >= WARM_FLIPS:
            rows.append((100 * engine.flip.seconds / total, engine.flip.seconds, total))
    percent, flip_seconds, rollout_seconds = (median(column) for column in zip(*rows, strict=True))
    return {
        "ours": percent,
        "peer": None,
        "unit": "% of the rollout",
        "lower_is_better": True,
        "detail": {
            "ranks": RANKS,
            "threads": 1,
            "dtype": precision,
            "flip_seconds": flip_seconds,
            "rollout_seconds": rollout_seconds,
            "bytes": engine.flip.bytes,
            "spread": spread([row[0] for row in rows]),
        },
    }


def release(rounds: int, precision: str) -> dict[str, Any]:
    """Measure the change of resident memory by a flip, in per cent: the largest change of all ranks and rounds."""
    task, engine = work("ragged"), sharded(precision)
    task = Work(task.shape, task.prompts[:16], [min(length, 24) for length in task.lengths[:16]], task.slots)
    changes, details = [], []
    for count in range(1 + rounds):
        train(engine)
        before = memory()
        rollout(engine, task, keep=False)
        after = memory()
        if count:  # the first flip includes allocations that a process makes once
            changes.append(max(dist.gather_objects(100 * (after["rss"] / before["rss"] - 1)), key=abs))
            details.append({"before": before, "after": after})
    return {
        "ours": max(changes, key=abs),
        "peer": None,
        "unit": "% more resident memory",
        "lower_is_better": True,
        "detail": {"ranks": RANKS, "dtype": precision, "rank_0": details[-1]},
    }


def sharded(precision: str) -> Engine:
    """Return an engine with OPT-125M's shape, ZeRO-3, AdamW and fp32 masters."""
    config = EngineConfig(zero_stage=3, dtype="bf16" if precision == "bf16" else "fp32")
    return Engine(model(), config, optimizer=OptimizerConfig(lr=1e-6), rollout_path="")


def model() -> Any:
    torch.manual_seed(0)
    fields = dict(OPT_125M)
    config = AutoConfig.for_model(fields.pop("model_type"), dropout=0.0, attention_dropout=0.0, **fields)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.generation_config.eos_token_id = None  # only the work's lengths end answers
    return module


def rollout(engine: Engine, task: Work, *, keep: bool = True) -> None:
    """Generate this rank's share of the work, flip included."""
    with engine.generating(keep=keep) as generator:
        indices = engine.flip.assign([len(prompt) for prompt in task.prompts])
        if indices:
            answer(generator, task, indices)


def answer(generator: Generator, task: Work, indices: list[int]) -> None:
    lengths = [task.lengths[i] for i in indices]
    prompts = [task.prompts[i] for i in indices]
    steps = generator.run(prompts, Sampling(max(lengths)), indices, task.slots, Lengths(lengths))
    count = sum(len(step) for step in steps)
    assert count == sum(lengths), f"{count} tokens were generated, not {sum(lengths)}"


def train(engine: Engine) -> None:
    """Run one optimizer step on 4 x 256 random tokens."""
    ids = torch.randint(10, OPT_125M["vocab_size"], (4, 256))

    def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return module(input_ids=batch, labels=batch, use_cache=False).loss * batch.numel(), {}

    engine.update([ids], loss, ids.numel() * dist.world().size)


def generate_sharded(task: Work, precision: str) -> float:
    """Measure useful tokens per second of transformers' `generate` on a module that FSDP2 shards."""
    module = model().eval()
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision])
    for block in module.model.decoder.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    first = dist.world().rank * task.slots
    prompts, lengths = task.prompts[first : first + task.slots], task.lengths[: RANKS * task.slots]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "disable_compile": True}

    def generate(new: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            module.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **settings)

    generate(2)  # the first call includes allocations
    longest = max(lengths)  # both ranks run as many steps, because they gather each layer together
    return sum(lengths) / timed(lambda: generate(longest))


def timed(call: Callable[[], None]) -> float:
    """Return the seconds until the last rank has finished the call."""
    dist.barrier()
    start = perf_counter()
    call()
    dist.barrier()
    return perf_counter() - start


def memory() -> dict[str, int]:
    """Return bytes of this process: resident, the shared part of these, and all live tensors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    with open("/proc/self/status", encoding="ascii") as lines:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    tensors = [item for item in gc.get_objects() if isinstance(item, Tensor) and not item.is_meta]
    storages = {}
    for tensor in map(dtensors.local, tensors):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    sizes = {"rss": kib["VmRSS"] * 1024, "shared": kib["RssShmem"] * 1024, "tensors": sum(storages.values())}
    dist.barrier()
    return sizes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
