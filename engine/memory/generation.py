"""What generating takes: the weights of the twin, packed layers, the key-value cache (engine/rollout)."""

from collections.abc import Mapping

from engine.memory.shapes import Shape
from engine.memory.states import SIZE
from engine.memory.workload import Workload
from engine.precision import TORCH_DTYPE
from engine.rollout.packed import FEWEST_NUMBERS

SLOT = 64  # tokens that a place in the cache grows by (engine/rollout/continuous.py)


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
    """Linear layers once more, as decoding reads them on CPUs (engine/rollout/packed.py)."""
    least = FEWEST_NUMBERS.get(TORCH_DTYPE[work.dtype])
    if not work.on_cpu or least is None:
        return 0
    copied = (layer for layer in shape.linears if layer.turned or not (work.in_place and work.dtype == "bf16"))
    return SIZE[work.dtype] * sum(layer.numbers for layer in copied if layer.numbers >= least)


def _cache(shape: Shape, work: Workload, beside: int) -> int:
    """A place for each sequence, on a GPU one more for rows that fill a step up; fewer where there is no room."""
    tokens = -(-(work.prompt + work.answer) // SLOT) * SLOT
    each = tokens * shape.cache_per_token * SIZE[work.dtype]
    wanted = each * (work.rollout_batch + (not work.on_cpu))
    most = work.cache_bytes
    if most is None and work.room is not None:
        most = max(each * min(work.least, work.rollout_batch), (work.room - beside) // 2)
    return wanted if most is None else min(wanted, most)
