"""Bytes of one model on one rank, by owner, while it trains, scores or rests."""

import math
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig, OptimizerConfig
from engine.kernels.token_logprobs import BLOCK_ELEMENTS
from engine.memory.activations import activations
from engine.memory.model_shape import ModelShape, pipeline_stages
from engine.memory.states import BYTES, ModelStates, frozen_states, model_states, shard_count
from engine.optim import averages_itself, moment_names

Owners = dict[str, int]


@dataclass(frozen=True)
class Workload:
    """The layout of a model, and the micro-batches that it trains on. Lengths count tokens.

    ranks: ranks that share the states; a tensor group or a pipeline counts once. step_tokens: one rank's tokens of an
    optimizer step (0: unknown, several micro-batches). item_sequences: sequences of one training item, which share a
    micro-batch (2 for a pair). adapters: trained parameters next to a frozen model (0: all parameters train); adapted:
    the weights that they modify. has_average: a moving average of the parameters exists. has_other_loss: each step has
    micro-batches of a second data source. is_cpu: the device is the host.
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
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.step_tokens == 0 or self.micro_batches > 1 or self.has_other_loss

    @property
    def shards(self) -> int:
        """Shards of a model's states."""
        return shard_count(self.config, self.ranks)

    def trained(self, parameters: int) -> int:
        """Return the trained parameters of a model."""
        return self.adapters or parameters


def trained_states(shape: ModelShape, work: Workload) -> ModelStates:
    """Return the states of a model that trains. On a CPU offloaded states count as host memory, at any ratio."""
    states = model_states(
        shape.parameters + work.adapters,
        root=shape.root,
        block=shape.block,
        config=work.config,
        ranks=work.ranks,
        trained=work.trained(shape.parameters),
        accumulates=work.accumulates,
        moments=len(moment_names(work.optimizer)),
        has_average=work.has_average,
        has_error_feedback=averages_itself(work.optimizer),
        is_single_rank=work.ranks == 1 and shape.tensor == 1,
    )
    if not work.is_cpu or work.config.offload_optimizer == "none":
        return states
    reduced = 0 if work.accumulates and work.config.zero_stage < 2 else states.gradients
    return replace(
        states,
        masters=0,
        moments=0,
        average=0,
        gradients=states.gradients - reduced,
        host=states.host + states.masters + states.moments + states.average + reduced,
        host_gradients=states.host_gradients + reduced,
    )


def scoring_states(shape: ModelShape, work: Workload) -> ModelStates:
    """Return the states of a frozen model."""
    sizes = {"root": shape.root, "block": shape.block, "config": work.config, "ranks": work.ranks}
    return frozen_states(shape.parameters, is_single_rank=work.ranks == 1 and shape.tensor == 1, **sizes)  # type: ignore[arg-type]


def resting_bytes(states: ModelStates) -> Owners:
    """Return the bytes between steps."""
    owners = {"parameters": states.parameters + states.masters, "optimizer": states.moments}
    return owners | ({"average": states.average} if states.average else {})


def training_bytes(
    shape: ModelShape, work: Workload, states: ModelStates, *, has_logits: bool = True, forwards: int = 1
) -> Owners:
    """Return the bytes that training adds, where `forwards` micro-batches wait for their backward."""
    saved = activations(
        shape,
        tokens=work.rank_tokens,
        length=work.max_length,
        dtype=work.config.dtype,
    )
    checkpointing = work.config.activation_checkpointing
    recomputed = saved.block if checkpointing else 0
    return {
        **gathered_bytes(states),
        "gradients": states.gradients,
        "reduction": states.reduction,
        "activations": forwards * (saved.total(checkpointing=checkpointing) - recomputed),
        "recomputed": recomputed,
        # A block of logits, its softmax and its gradient; and gradients of hidden states in fp32.
        "logits": 12 * _logits(shape, work) + 4 * work.rank_tokens * shape.width if has_logits else 0,
    }


def gathered_bytes(states: ModelStates) -> Owners:
    """Return the bytes of gathered parameters."""
    return {"gathered": states.gathered - states.prefetched, "prefetched": states.prefetched}


def scoring_logits(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of a block of logits and its softmax."""
    return 8 * _logits(shape, work)


def pipeline_training_bytes(shape: ModelShape, work: Workload) -> list[tuple[Owners, ModelStates]]:
    """Return the bytes of each pipeline stage at the peak of training, and its model states.

    Of P stages, stage p holds the activations of P - p micro-batches (1F1B), or of all of a step's (GPipe). Buffers for
    messages exist for every micro-batch of a step.
    """
    ranks, found = work.config.pipeline_parallel, list[tuple[Owners, ModelStates]]()
    for rank, stage in enumerate(pipeline_stages(shape, ranks)):
        own = replace(work, adapters=work.adapters * stage.blocks // shape.blocks)
        states = trained_states(stage, own)
        is_last = rank == ranks - 1
        count = work.micro_batches
        waiting = count if work.config.pipeline_schedule == "gpipe" else min(count, ranks - rank)
        owners = resting_bytes(states) | training_bytes(stage, own, states, has_logits=is_last, forwards=waiting)
        if not is_last:  # what is saved outside of the blocks belongs to the final norm
            saved = activations(stage, tokens=work.rank_tokens, length=work.max_length, dtype=work.config.dtype)
            owners["activations"] -= waiting * saved.outside
        sides = (rank > 0) + (not is_last)
        message = work.rank_tokens * shape.width * BYTES[work.config.dtype]
        owners["messages"] = message * (sides * count + (0 if is_last else waiting))
        found.append((owners, states))
    return found


def _logits(shape: ModelShape, work: Workload) -> int:
    """Return the number of logits that exist at a time."""
    return min(work.rank_tokens * shape.vocabulary, BLOCK_ELEMENTS["cpu" if work.is_cpu else "cuda"])
