"""The flip between training and generating, ZeRO-3 on 2 ranks: its cost, what it buys, what it leaves in memory.

zero3: the ragged work of both ranks, 16 answers at a time on all together, flip included, against transformers'
`generate` on the FSDP2 module, which gathers each layer for each token. The peer answers the first batch only, 8
prompts a rank, and runs once: it takes minutes. The detail says what we make of 16 at a time on each rank. flip:
seconds in and out as a share of the rollout they serve, with a training step before each. release: resident memory
(Linux' RSS, shared pages included, after malloc_trim) after leaving with everything freed, beside that before entering.
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
WARM_FLIPS = 2  # the first ones are checked, and pay for memory


def measure(case: str, rounds: int) -> Result:
    """Run a case on its ranks, in processes of their own."""
    first, *_ = run_ranks(__name__, [case, str(rounds), cpu_precision()], RANKS)
    return Result(bench="rollout", case=case, **first)


def main(case: str, rounds: int, precision: str) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.start("bench", device="cpu")
    found = {"zero3": zero3, "flip": flip, "release": release}[case](rounds, precision)
    print(json.dumps(found), flush=True)
    dist.stop()


def zero3(rounds: int, precision: str) -> dict[str, Any]:
    """Useful tokens a second, ours and the peer's."""
    full, engine = work("ragged"), sharded(precision)
    task = replace(full, slots=full.slots // RANKS)
    for _ in range(WARM_FLIPS):
        rollout(engine, task)
    rates = [sum(task.lengths) / timed(lambda: rollout(engine, task)) for _ in range(rounds)]
    rollout(engine, full)  # a larger cache
    wide = sum(full.lengths) / timed(lambda: rollout(engine, full))
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
            "ours_16_a_rank": wide,
        },
    }


def flip(rounds: int, precision: str) -> dict[str, Any]:
    """The flip's share of the time of flip and rollout, in per cent."""
    task, engine = work("ragged"), sharded(precision)
    figures = []
    for count in range(WARM_FLIPS + rounds):
        train(engine)
        whole = timed(lambda: rollout(engine, task))
        if count >= WARM_FLIPS:
            figures.append((100 * engine.flip.seconds / whole, engine.flip.seconds, whole))
    percent, seconds, whole = (median(column) for column in zip(*figures, strict=True))
    return {
        "ours": percent,
        "peer": None,
        "unit": "% of the rollout",
        "lower_is_better": True,
        "detail": {
            "ranks": RANKS,
            "threads": 1,
            "dtype": precision,
            "flip_seconds": seconds,
            "rollout_seconds": whole,
            "bytes": engine.flip.bytes,
            "spread": spread([figure[0] for figure in figures]),
        },
    }


def release(rounds: int, precision: str) -> dict[str, Any]:
    """Resident memory after a flip, in per cent of that before; the largest difference of all ranks and rounds."""
    task, engine = work("ragged"), sharded(precision)
    task = Work(task.shape, task.prompts[:16], [min(length, 24) for length in task.lengths[:16]], task.slots)
    changes, details = [], []
    for count in range(1 + rounds):
        train(engine)
        before = memory()
        rollout(engine, task, keep=False)
        after = memory()
        if count:  # what a process allocates once for all is there after the first
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
    """OPT-125M's shape under ZeRO-3, with AdamW and fp32 masters."""
    config = EngineConfig(zero_stage=3, dtype="bf16" if precision == "bf16" else "fp32")
    return Engine(model(), config, optimizer=OptimizerConfig(lr=1e-6), rollout_path="")


def model() -> Any:
    torch.manual_seed(0)
    fields = dict(OPT_125M)
    config = AutoConfig.for_model(fields.pop("model_type"), dropout=0.0, attention_dropout=0.0, **fields)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.generation_config.eos_token_id = None  # ends come from the work's lengths alone
    return module


def rollout(engine: Engine, task: Work, *, keep: bool = True) -> None:
    """This rank's part of the work, flip included."""
    expected = sum(task.lengths) / len(task.lengths)
    with engine.generating(keep=keep) as rollouts:
        mine = engine.flip.assign([len(prompt) for prompt in task.prompts], expected)
        if mine:
            answer(rollouts, task, mine)


def answer(rollouts: Generator, task: Work, places: list[int]) -> None:
    lengths = [task.lengths[i] for i in places]
    prompts = [task.prompts[i] for i in places]
    steps = rollouts.run(prompts, Sampling(max(lengths)), places, task.slots, Lengths(lengths))
    drawn = sum(len(step) for step in steps)
    assert drawn == sum(lengths), f"{drawn} tokens were drawn, not {sum(lengths)}"


def train(engine: Engine) -> None:
    """One optimizer step on 4 x 256 random tokens."""
    ids = torch.randint(10, OPT_125M["vocab_size"], (4, 256))

    def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return module(input_ids=batch, labels=batch, use_cache=False).loss * batch.numel(), {}

    engine.update([ids], loss, ids.numel() * dist.world().size)


def generate_sharded(task: Work, precision: str) -> float:
    """Useful tokens a second of transformers' `generate` on the module as FSDP2 shards it."""
    module = model().eval()
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision])
    for block in module.model.decoder.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    first = dist.world().rank * task.slots
    prompts, lengths = task.prompts[first : first + task.slots], task.lengths[: RANKS * task.slots]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "disable_compile": True}

    def generate(new: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            module.generate(ids, attention_mask=seen, max_new_tokens=new, min_new_tokens=new, **settings)

    generate(2)  # the first pays for memory
    longest = max(lengths)  # ranks gather together, so both take as many steps
    return sum(lengths) / timed(lambda: generate(longest))


def timed(call: Callable[[], None]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    began = perf_counter()
    call()
    dist.barrier()
    return perf_counter() - began


def memory() -> dict[str, int]:
    """Bytes of this process: resident, of that shared, and of all tensors that are alive."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    with open("/proc/self/status", encoding="ascii") as lines:
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and not each.is_meta]
    storages = {}
    for tensor in map(dtensors.local, tensors):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    found = {"rss": kib["VmRSS"] * 1024, "shared": kib["RssShmem"] * 1024, "tensors": sum(storages.values())}
    dist.barrier()
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
