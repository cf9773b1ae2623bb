"""Predict the bytes of one model on one rank, by owner, while it trains, scores or generates."""

import math
import sys
from dataclasses import dataclass, field, replace

from engine.config import TORCH_DTYPE, EngineConfig, OptimizerConfig
from engine.generation.decode_loop import PREFILL_TOKENS
from engine.generation.kv_cache import CacheDemand
from engine.generation.prepacked_linears import MIN_NUMEL, copies_weights
from engine.kernels import varlen_kernel
from engine.kernels.token_logprobs import BLOCK_ELEMENTS
from engine.kernels_cpu.library import library
from engine.memory.activations import Activations, activations
from engine.memory.model_shape import ModelShape, pipeline_stages
from engine.memory.states import BYTES, ModelStates, Owners, frozen_states, model_states, shard_count
from engine.optim import averages_itself, moment_names

# Owners that `GenerationLoad.keep` holds between calls.
RETAINED = ("inference_model", "prepacked_linears", "decode_graphs", "cache")
GRAPHED_SETTINGS = 2  # sampling settings whose CUDA graphs exist at a time: those of rollouts and of evaluations


@dataclass(frozen=True)
class Workload:
    """The layout of a model, and the micro-batches that it trains on. Lengths count tokens.

    ranks: ranks that share the states; a tensor group or a pipeline counts once. step_tokens: one rank's tokens of an
    optimizer step (0: unknown, several micro-batches). item_sequences: sequences of one training item, which share a
    micro-batch (2 for a pair). adapters: trained parameters next to a frozen model (0: all parameters train); adapted:
    the weights that they modify. packed: the frozen weights in packed layers, which need packed_bytes. has_average: a
    moving average of the parameters exists. has_other_loss: each step has micro-batches of a second data source.
    is_cpu: the device is the host.
    """

    config: EngineConfig = field(default_factory=EngineConfig)
    ranks: int = 1
    micro_batch_tokens: int = 8192
    max_length: int = 1024
    step_tokens: int = 0
    item_sequences: int = 1
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))
    has_average: bool = False
    has_other_loss: bool = False
    adapters: int = 0
    adapted: int = 0
    packed: int = 0
    packed_bytes: int = 0
    is_cpu: bool = False

    @property
    def min_tokens(self) -> int:
        """Tokens of a micro-batch of one item, which is never split."""
        return self.item_sequences * self.max_length

    @property
    def rank_tokens(self) -> int:
        """Tokens of the largest micro-batch on one rank."""
        return math.ceil(max(self.micro_batch_tokens, self.min_tokens) / self.config.sequence_parallel)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step. A pipeline has at least one for each stage."""
        return max(self.config.pipeline_parallel, math.ceil(self.step_tokens / self.micro_batch_tokens))

    @property
    def shards(self) -> int:
        """Shards of a model's states."""
        return shard_count(self.config, self.ranks)

    def trained(self, shape: ModelShape) -> int:
        """Return the trained parameters of a model."""
        return self.adapters or shape.parameters


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


def trained_states(shape: ModelShape, work: Workload) -> ModelStates:
    """Return the states of a model that trains.

    Over packed layers, only the adapters have fp32 masters. The other frozen parameters are in compute precision.
    """
    parameters, root = shape.parameters + work.adapters, shape.root_unit + shape.largest_released - shape.block
    block, unit = shape.block, shape.largest_unit
    if work.packed:
        parameters, root = work.adapters, 0
        block = unit = work.adapters // shape.blocks
    states = model_states(
        parameters,
        root=root,
        block=block,
        unit=unit,
        config=work.config,
        ranks=work.ranks,
        trained=work.trained(shape),
        accumulates=work.step_tokens == 0 or work.micro_batches > 1 or work.has_other_loss,
        moments=len(moment_names(work.optimizer)),
        has_average=work.has_average,
        has_error_feedback=averages_itself(work.optimizer),
    )
    return _with_packed(states, shape, work) if work.packed else states


def _with_packed(states: ModelStates, shape: ModelShape, work: Workload) -> ModelStates:
    """Add packed layers, and the frozen parameters outside of them, which FSDP2 shards and gathers."""
    others = BYTES[work.config.dtype] * (shape.parameters - work.packed)
    is_plain = work.ranks == 1 and work.config.states == "fp32"
    parameters = states.parameters + work.packed_bytes + others // work.shards
    return replace(states, parameters=parameters, gathered=states.gathered + (0 if is_plain else others))


def scoring_states(shape: ModelShape, work: Workload) -> ModelStates:
    """Return the states of a frozen model."""
    if work.packed:
        return _with_packed(ModelStates(), shape, work)
    root = shape.root_unit + shape.largest_released - shape.block
    return frozen_states(shape.parameters, root=root, block=shape.block, config=work.config, ranks=work.ranks)


def resting_bytes(states: ModelStates) -> Owners:
    """Return the bytes on the device between steps."""
    owners = {"parameters": states.parameters, "optimizer": states.optimizer}
    return owners | ({"average": states.average} if states.average else {})


def training_bytes(
    shape: ModelShape, work: Workload, states: ModelStates, *, has_logits: bool = True, forwards: int = 1
) -> Owners:
    """Return the bytes that training adds, where `forwards` micro-batches wait for their backward."""
    saved = _activations(shape, work, work.rank_tokens, work.max_length)
    checkpointing = work.config.activation_checkpointing
    owners = {
        **_gathered_bytes(states),
        "gradients": states.gradients,
        "reduction": states.reduction,
        "activations": forwards * saved.total(checkpointing=checkpointing),
        "recomputed": saved.block if checkpointing else 0,
        # A block of logits, its softmax and its gradient; and gradients of hidden states in fp32.
        "logits": 12 * _logits(shape, work) + 4 * work.rank_tokens * shape.width if has_logits else 0,
        **_unpacked(shape, work),
    }
    return owners | ({"overlap": -states.overlap} if states.overlap else {})


def scoring_bytes(shape: ModelShape, work: Workload, states: ModelStates) -> Owners:
    """Return the bytes that scoring adds: gathered parameters, a block of logits and its softmax."""
    return _gathered_bytes(states) | {"logits": 8 * _logits(shape, work)} | _unpacked(shape, work)


def pipeline_training_bytes(shape: ModelShape, work: Workload) -> list[Owners]:
    """Return the bytes of each pipeline stage at the peak of training.

    Of P stages, stage p holds the activations of P - p micro-batches. Buffers for messages exist for every micro-batch
    of a step.
    """
    ranks, count, peaks = work.config.pipeline_parallel, work.micro_batches, list[Owners]()
    for rank, stage in enumerate(pipeline_stages(shape, ranks)):
        states = trained_states(stage, replace(work, adapters=work.adapters * stage.blocks // shape.blocks))
        is_last = rank == ranks - 1
        waiting = min(count, ranks - rank)
        owners = resting_bytes(states) | training_bytes(stage, work, states, has_logits=is_last, forwards=waiting)
        if not is_last:  # tensors that are saved outside of the blocks belong to the final norm
            owners["activations"] -= waiting * _activations(stage, work, work.rank_tokens, work.max_length).outside
        neighbors = (rank > 0) + (not is_last)
        message = work.rank_tokens * shape.width * BYTES[work.config.dtype]
        owners["messages"] = message * (neighbors * count + (0 if is_last else waiting))
        peaks.append(owners)
    return peaks


def generation_bytes(
    shape: ModelShape, work: Workload, load: GenerationLoad, *, is_split: bool, resident: int
) -> Owners:
    """Return the bytes that generation adds: weights, cache, and the tensors of prefills and of decode steps.

    One block runs at a time, without gradients, and the tensors that it would save for backward bound its tensors.
    CUDA graphs hold the tensors of the largest step for each of their sampling settings. `is_split` means that ranks
    share the parameters, so that generation needs a full copy; `resident` are the bytes that other owners hold.
    """
    number = BYTES[work.config.dtype]
    tokens = min(PREFILL_TOKENS["cpu" if work.is_cpu else "cuda"], load.prompt * load.slots) + load.slots
    block = _activations(shape, work, tokens, 16).block // tokens  # attention over the cache has no (T, T) tensors
    has_graphs = not (work.is_cpu or load.stream)
    owners = {
        "inference_model": _weight_bytes(shape, work, load, is_split=is_split or work.shards > 1),
        "prepacked_linears": _prepacked_bytes(shape, work),
        "prefill": block * tokens,
        "decode_graphs": GRAPHED_SETTINGS * load.slots * (block + number * shape.vocabulary) if has_graphs else 0,
        "logits": 4 * 2 * load.slots * shape.vocabulary,
        **_unpacked(shape, work),
    }
    return owners | {"cache": _cache_bytes(shape, work, load, resident + sum(owners.values()))}


def _activations(shape: ModelShape, work: Workload, tokens: int, length: int) -> Activations:
    """Return the activations of `tokens` tokens, in sequences of `length`, on one rank.

    Without a kernel for packed rows, attention runs once per sequence and copies its outputs into one tensor.
    """
    config = work.config
    if work.is_cpu:
        has_kernel = config.dtype != "fp16" and library("ragged_attention") is not None
    else:
        has_kernel = config.dtype != "fp32" and varlen_kernel() is not None
    has_dropout = getattr(shape.config.get_text_config(), "attention_dropout", 0.0) > 0
    return activations(
        shape,
        tokens=tokens,
        length=length,
        dtype=config.dtype,
        copies_output=not has_kernel or has_dropout or config.sequence_parallel > 1,
        has_adapters=work.adapters > 0,
    )


def _unpacked(shape: ModelShape, work: Workload) -> Owners:
    """Return the bytes of the largest packed weight in compute precision: one exists at a time."""
    largest = max((layer.parameters for layer in shape.linears if not layer.is_head), default=0)
    return {"unpacked": BYTES[work.config.dtype] * largest} if work.packed else {}


def _gathered_bytes(states: ModelStates) -> Owners:
    return {"gathered": states.gathered - states.prefetched, "prefetched": states.prefetched}


def _weight_bytes(shape: ModelShape, work: Workload, load: GenerationLoad, *, is_split: bool) -> int:
    """Return the bytes of weights that the inference model cannot share with the trained model."""
    config = work.config
    if work.packed:  # the packed layers are shared; on several ranks the other parameters are gathered
        copied = work.adapters if config.dtype != "fp32" and config.states == "fp32" else 0
        return BYTES[config.dtype] * (shape.parameters - work.packed + work.adapters if is_split else copied)
    is_offloaded = not work.is_cpu and config.offload_parameters != "none"
    is_cast = config.dtype != "fp32" and config.offload_optimizer == "none" and config.states == "fp32"
    if is_split or is_offloaded or is_cast:
        copied = min(shape.parameters, shape.root + 2 * shape.block) if load.stream else shape.parameters
    else:  # only weights with merged adapters are copies
        copied = min(work.adapted, 2 * shape.block) if load.stream else work.adapted
    return BYTES[config.dtype] * copied


def _prepacked_bytes(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of linear layers that are copied into the layout of the CPU's matrix products."""
    dtype = TORCH_DTYPE[work.config.dtype]
    if not work.is_cpu or dtype not in MIN_NUMEL or not copies_weights(dtype):
        return 0
    sizes = (layer.parameters // shape.tensor for layer in shape.linears if layer.is_head or not work.packed)
    return BYTES[work.config.dtype] * sum(size for size in sizes if size >= MIN_NUMEL[dtype])


def _cache_bytes(shape: ModelShape, work: Workload, load: GenerationLoad, resident: int) -> int:
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


def _logits(shape: ModelShape, work: Workload) -> int:
    """Return the number of logits that exist at a time."""
    return min(work.rank_tokens * shape.vocabulary, BLOCK_ELEMENTS["cpu" if work.is_cpu else "cuda"])
