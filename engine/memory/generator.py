"""Bytes that generation adds on one rank: the inference model's weights, prepacked linears, the key-value cache."""

import math
import sys
from dataclasses import dataclass

from engine.generation.kv_cache import CacheDemand
from engine.generation.prepacked_linears import MIN_NUMEL, copies_weights
from engine.memory.model_shape import ModelShape
from engine.memory.states import BYTES
from engine.memory.workload import Owners, Workload
from engine.precision import TORCH_DTYPE

RETAINED = ("inference_model", "prepacked_linears", "cache")  # what `GenerationLoad.keep` holds between calls


@dataclass(frozen=True)
class GenerationLoad:
    """One call of generation: `sequences` responses (0: as many as slots), `samples` a prompt, on `slots` slots.

    keep, stream, park_optimizer, cache_bytes: as in the engine's `generating` and `Generator`. free_bytes: the device's
    memory, of which the cache takes half of what is left over (None: unlimited).
    """

    prompt: int = 512
    response: int = 256
    slots: int = 64
    sequences: int = 0
    samples: int = 1
    keep: bool = True
    stream: bool = False
    park_optimizer: bool = False
    cache_bytes: int | None = None
    free_bytes: int | None = None


def generation_bytes(
    shape: ModelShape, work: Workload, load: GenerationLoad, *, trained: ModelShape, resident: int
) -> Owners:
    """Return the bytes that generation adds. `trained` is the shape that trains, `resident` what other owners hold."""
    owners = {
        "inference_model": _weights(shape, work, load, trained),
        "prepacked_linears": _prepacked(shape, work),
        "logits": 4 * 2 * load.slots * shape.vocabulary,
    }
    return owners | {"cache": _cache(shape, work, load, resident + sum(owners.values()))}


def _weights(shape: ModelShape, work: Workload, load: GenerationLoad, trained: ModelShape) -> int:
    """Return the bytes of weights that the inference model cannot share with the trained model."""
    config = work.config
    is_split = trained.tensor > 1 or shape.tensor > 1 or work.shards > 1
    is_offloaded = not work.is_cpu and config.offload_parameters != "none"
    is_cast = config.dtype != "fp32" and config.offload_optimizer == "none" and config.states == "fp32"
    if is_split or is_offloaded or is_cast:
        copied = min(shape.parameters, shape.root + 2 * shape.block) if load.stream else shape.parameters
    else:  # merged adapters alone
        copied = min(work.adapted, 2 * shape.block) if load.stream else work.adapted
    return BYTES[config.dtype] * copied


def _prepacked(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of linear layers that are copied into the layout of the CPU's matrix products."""
    least = MIN_NUMEL.get(TORCH_DTYPE[work.config.dtype])
    if not work.is_cpu or least is None:
        return 0
    copies_all = copies_weights(TORCH_DTYPE[work.config.dtype])
    copied = (layer.parameters for layer in shape.linears if layer.is_transposed or copies_all)
    return BYTES[work.config.dtype] * sum(size for size in copied if size >= least)


def _cache(shape: ModelShape, work: Workload, load: GenerationLoad, resident: int) -> int:
    """Return the bytes of the cache: a slot for each sequence and for each prompt, or fewer where memory is short.

    At least eight sequences have to fit. The samples of a prompt share its slot.
    """
    token = shape.cache_per_token * BYTES[work.config.dtype]
    if not token:
        return 0
    sequences = load.sequences or load.slots
    slots, prompts = min(load.slots, sequences), math.ceil(sequences / load.samples)
    demand = CacheDemand(load.prompt, load.response, prompts=prompts, sequences=sequences, batch_size=slots)
    limit = load.cache_bytes
    if limit is None and load.free_bytes is not None:
        few = CacheDemand(load.prompt, load.response, prompts=8, sequences=8, batch_size=min(8, slots))
        limit = max(token * few.size_within(sys.maxsize).tokens, (load.free_bytes - resident) // 2)
    return token * demand.size_within(sys.maxsize if limit is None else limit // token).tokens
