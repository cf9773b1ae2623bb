"""Predict the bytes of one model on one rank, by owner, while it trains, scores or generates."""

import math
import sys
from dataclasses import dataclass

from engine.config import TORCH_DTYPE
from engine.generation.decode_loop import PREFILL_TOKENS
from engine.generation.kv_cache import CacheDemand
from engine.generation.prepacked_linears import copies_weights
from engine.kernels.token_logprobs import BLOCK_ELEMENTS
from engine.memory.activations import activations
from engine.memory.model_shape import ModelShape
from engine.memory.states import BYTES, ModelStates, Owners, Workload

# Owners that `GenerationLoad.keep` holds between calls.
RETAINED = ("inference_model", "prepacked_linears", "cache")


@dataclass(frozen=True)
class GenerationLoad:
    """One call of generation: `sequences` responses, `samples` a prompt, `slots` at a time.

    keep, stream, park_optimizer, cache_bytes: as in the engine's `generating` and `Generator`. With `uses_vllm`, vLLM
    generates; the slots are then the sequences that it decodes at a time.
    """

    prompt: int = 512
    response: int = 256
    slots: int = 64
    sequences: int = 64
    samples: int = 1
    keep: bool = True
    stream: bool = False
    park_optimizer: bool = False
    cache_bytes: int | None = None
    uses_vllm: bool = False


def resting_bytes(states: ModelStates) -> Owners:
    """Return the bytes on the device between steps."""
    owners = {"parameters": states.parameters, "optimizer": states.optimizer}
    return owners | ({"average": states.average} if states.average else {})


def training_bytes(shape: ModelShape, work: Workload, states: ModelStates, *, forwards: int = 1) -> Owners:
    """Return the bytes that training adds, where `forwards` micro-batches wait for their backward.

    In a pipeline of P stages, P micro-batches wait on the first stage. Messages between stages are not counted.
    """
    forwards = max(forwards, min(work.micro_batches, work.config.pipeline_parallel))
    saved = activations(shape, work, tokens=work.rank_tokens, length=work.max_length)
    block, recomputed = saved.block, 0
    if work.config.activation_checkpointing:  # the input of each block is saved
        block, recomputed = work.rank_tokens * shape.width * BYTES[work.config.dtype], saved.block
    # A block of logits, its softmax and its gradient; and gradients of hidden states in fp32.
    logits = 12 * _logits(shape, work) + 4 * work.rank_tokens * shape.width if shape.vocabulary else 0
    owners = {
        **_gathered_bytes(states),
        "gradients": states.gradients,
        "reduction": states.reduction,
        "activations": forwards * (saved.outside + shape.blocks * block),
        "recomputed": recomputed,
        "logits": logits,
    }
    return owners | ({"overlap": -states.overlap} if states.overlap else {})


def scoring_bytes(shape: ModelShape, work: Workload, states: ModelStates) -> Owners:
    """Return the bytes that scoring adds: gathered parameters, a block of logits and its softmax."""
    return _gathered_bytes(states) | {"logits": 8 * _logits(shape, work)}


def generation_bytes(
    shape: ModelShape, work: Workload, load: GenerationLoad, *, resident: int = 0, free_bytes: int | None = None
) -> Owners:
    """Return the bytes that generation adds: weights, cache, and the tensors of prefills and of decode steps.

    One block runs at a time, without gradients, and the tensors that it would save for backward bound its tensors. The
    cache takes half of what `resident` bytes of other owners leave of the device's `free_bytes` (None: unlimited). Not
    counted: the tensors of decode steps that CUDA graphs hold, below 1 % of a peak.

    vLLM has full weights of its own. The weights that the sync gathers exist until vLLM has copied them
    ("weight_sync"). Its cache has `cache_bytes`, or pages for the slots.
    """
    tokens = min(PREFILL_TOKENS["cpu" if work.is_cpu else "cuda"], load.prompt * load.slots) + load.slots
    block = activations(shape, work, tokens=tokens, length=16).block  # attention over the cache has no (T, T) tensors
    temporary = {"prefill": block, "logits": 4 * 2 * load.slots * shape.vocabulary}
    gathered = _weight_bytes(shape, work, load)
    if load.uses_vllm:
        number = BYTES[work.config.dtype]
        pages = load.slots * (load.prompt + load.response) * number * shape.cache_per_token
        return {
            "weight_sync": gathered,
            "inference_model": number * shape.parameters,
            **temporary,
            "cache": pages if load.cache_bytes is None else load.cache_bytes,
        }
    owners = {
        "inference_model": gathered,
        "prepacked_linears": _prepacked_bytes(shape, work),
        **temporary,
    }
    free = None if free_bytes is None else free_bytes - resident - sum(owners.values())
    return owners | {"cache": _cache_bytes(shape, work, load, free)}


def _gathered_bytes(states: ModelStates) -> Owners:
    return {"gathered": states.gathered - states.prefetched, "prefetched": states.prefetched}


def _weight_bytes(shape: ModelShape, work: Workload, load: GenerationLoad) -> int:
    """Return the bytes of weights that the inference model cannot share with the trained model."""
    config = work.config
    is_split = max(shape.tensor, config.tensor_parallel, config.pipeline_parallel, work.shards) > 1
    is_cast = config.dtype != "fp32" and config.offload_optimizer == "none" and config.states == "fp32"
    if work.packed:  # the packed layers are shared; on several ranks the other parameters are gathered
        frozen = shape.parameters - work.packed if is_split else 0
        return BYTES[config.dtype] * (frozen + work.adapters if is_split or is_cast else 0)
    is_offloaded = not work.is_cpu and config.offload_parameters != "none"
    full = shape.root + 2 * shape.block if load.stream else shape.parameters
    if not (is_split or is_offloaded):
        if work.adapters:  # weights with merged adapters are copies
            full = min(full, sum(layer.parameters for layer in shape.linears if not layer.is_head))
        elif not is_cast:
            return 0
    return BYTES[config.dtype] * full


def _prepacked_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of linear layers that are copied into the layout of the CPU's matrix products."""
    if not work.is_cpu or not copies_weights(TORCH_DTYPE[work.config.dtype]):
        return 0
    sizes = (layer.parameters // shape.tensor for layer in shape.linears if layer.is_head or not work.packed)
    return BYTES[work.config.dtype] * sum(sizes)


def _cache_bytes(shape: ModelShape, work: Workload, load: GenerationLoad, free: int | None) -> int:
    """Return the bytes of the cache: a slot for each sequence and for each prompt, or fewer where memory is short.

    At least eight sequences have to fit. The samples of a prompt share its slot.
    """
    token = shape.cache_per_token * BYTES[work.config.dtype]
    if not token:
        return 0
    prompts = math.ceil(load.sequences / load.samples)
    demand = CacheDemand(load.prompt, load.response, prompts, load.sequences, load.slots)
    limit = load.cache_bytes
    if limit is None and free is not None:
        few = CacheDemand(load.prompt, load.response, prompts=8, sequences=8, batch_size=8)
        limit = max(token * few.size_within(sys.maxsize).tokens, free // 2)
    return token * demand.size_within(sys.maxsize if limit is None else limit // token).tokens


def _logits(shape: ModelShape, work: Workload) -> int:
    """Return the number of logits that exist at a time."""
    return min(work.rank_tokens * shape.vocabulary, BLOCK_ELEMENTS["cpu" if work.is_cpu else "cuda"])
