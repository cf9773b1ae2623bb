"""What generating takes: the weights of the twin, packed layers, the key-value cache (engine/generation)."""

import math
import sys
from collections.abc import Mapping

from engine.generation.on_device.caches import ROUND_CAPACITY
from engine.generation.on_device.caches import Demand as Slots
from engine.generation.packed import FEWEST_NUMBERS
from engine.memory.shapes import Shape
from engine.memory.states import SIZE
from engine.memory.workload import Workload
from engine.precision import TORCH_DTYPE


def generating(shape: Shape, work: Workload, trained: Shape, rest: Mapping[str, int]) -> dict[str, int]:
    """The flip's gathered weights, and the cache of the sequences that are decoded together, beside what rests."""
    found = {
        "twin": _twin(shape, work, trained),
        "packs": _packs(shape, work),
        "logits": 4 * 2 * work.rollout_batch * shape.vocabulary,
    }
    return found | {"cache": _cache(shape, work, sum(rest.values()) + sum(found.values()))}


def _twin(shape: Shape, work: Workload, trained: Shape) -> int:
    """The weights to generate with: shared where nothing is sharded, split, cast, merged or elsewhere."""
    split = trained.tensor > 1 or shape.tensor > 1
    here = work.on_cpu or work.offload_parameters == "none"
    cast = work.dtype != "fp32" and work.offload_optimizer == "none" and work.states == "fp32"
    if split or not here or cast or work.shards > 1:
        own = shape.parameters if not work.streams else min(shape.parameters, shape.root + 2 * shape.block)
    else:
        own = work.adapted if not work.streams else min(work.adapted, 2 * shape.block)
    return SIZE[work.dtype] * own


def _packs(shape: Shape, work: Workload) -> int:
    """Linear layers once more, as decoding reads them on CPUs (engine/generation/packed.py)."""
    least = FEWEST_NUMBERS.get(TORCH_DTYPE[work.dtype])
    if not work.on_cpu or least is None:
        return 0
    copied = (layer for layer in shape.linears if layer.turned or not (work.in_place and work.dtype == "bf16"))
    return SIZE[work.dtype] * sum(layer.numbers for layer in copied if layer.numbers >= least)


def _cache(shape: Shape, work: Workload, beside: int) -> int:
    """A place for each sequence; fewer where there is no room."""
    number = shape.cache_per_token * SIZE[work.dtype]
    if not work.on_cpu:
        return number * _static_tokens(work, beside, number)
    each = number * _rounded(work.prompt + work.answer)
    most = _most(work, beside, each * min(work.least, work.rollout_batch))
    return each * work.rollout_batch if most is None else min(each * work.rollout_batch, most)


def _static_tokens(work: Workload, beside: int, number: int) -> int:
    """On a GPU prompts have slots of their own, which their samples share, and answers have one to spare."""
    total = work.answers or work.rollout_batch
    asked = Slots(
        work.prompt,
        work.answer,
        prompts=math.ceil(total / work.samples),
        sequences=total,
        slots=min(work.rollout_batch, total),
    )
    few = min(work.least, asked.slots)
    least = (few + 1) * _rounded(work.answer + 1) + few * _rounded(work.prompt)
    most = _most(work, beside, number * least)
    caches = asked.fitting(sys.maxsize if most is None else most // number)
    return sum(cache.slots * cache.capacity for cache in (caches.prompts, caches.answers))


def _most(work: Workload, beside: int, least: int) -> int | None:
    """Bytes that the cache may take, of which some have to be there."""
    if work.cache_bytes is not None or work.room is None:
        return work.cache_bytes
    return max(least, (work.room - beside) // 2)


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND_CAPACITY) * ROUND_CAPACITY
