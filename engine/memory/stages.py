"""What each stage of the pipeline needs of a device, by owner: states, activations, logits, cache, the models of PPO.

Heights are added where things live at the same time: all models rest, one of them works, on one micro-batch. The pieces
of a pipeline work on several: the first of P on P of them, the last on one; with all forwards first each on all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.config import PipelineSchedule, Precision, Tier
from engine.memory.activations import activations
from engine.memory.pieces import pieces_of
from engine.memory.shapes import Shape
from engine.memory.states import SIZE, ModelStates, frozen_states, model_states

LOGIT_BLOCK = 2**25  # logits that are held at once (engine/kernels/token_logprobs.py)


@dataclass(frozen=True)
class Workload:
    """How models are laid out and fed. Lengths are tokens; `rollout_batch` sequences are decoded together.

    `ranks` share a model's states; ranks of a tensor group count once, and their shapes are narrower. Every `sequence`
    of them share out the tokens of a micro-batch. `states` as in EngineConfig; `errors` are 1-bit Adam's. `packs` says
    that linear layers are laid out for generating (on CPUs), `in_place` that those in bf16 are read where they lie,
    which needs a copy of the turned ones alone. A pipeline deals a model out in `pieces`, which `ranks` does not count;
    `step_tokens` are a rank's of a step. `joins` is that of engine/memory/activations.py. What PPO generates with is
    held while it trains where it `keeps` that.
    """

    ranks: int = 1
    stage: int = 0
    dtype: Precision = "bf16"
    offload_optimizer: Tier = "none"
    offload_parameters: Tier = "none"
    checkpointing: bool = False
    micro_batch_tokens: int = 8192
    max_length: int = 1024
    prompt: int = 512
    answer: int = 256
    rollout_batch: int = 64
    accumulates: bool = True
    trained_share: float = 1.0
    states: Literal["fp32", "bf16"] = "fp32"
    errors: bool = False
    packs: bool = False
    in_place: bool = False
    joins: bool = False
    pieces: int = 1
    schedule: PipelineSchedule = "1f1b"
    step_tokens: int = 0
    sequence: int = 1
    keeps: bool = True

    @property
    def row_tokens(self) -> int:
        """Of a micro-batch, at most, on one rank."""
        return math.ceil(max(self.micro_batch_tokens, self.max_length) / self.sequence)

    @property
    def micro_batches(self) -> int:
        """Of a step; a pipeline has one for each piece at least."""
        return max(self.pieces, math.ceil(self.step_tokens / self.micro_batch_tokens))


@dataclass(frozen=True)
class Demand:
    """Bytes on one device by owner, at the height of each phase, and bytes on the host and in files a rank."""

    phases: dict[str, dict[str, int]]
    host: int = 0
    nvme: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def everywhere(self) -> dict[str, dict[str, int]]:
        """`phases`, with what is on the host and in files beside what is on the device."""
        elsewhere = {owner: size for owner, size in (("host", self.host), ("nvme", self.nvme)) if size}
        return {phase: owners | elsewhere for phase, owners in self.phases.items()}

    @property
    def peak(self) -> int:
        """The height of the highest phase."""
        return max(sum(owners.values()) for owners in self.phases.values())

    @property
    def worst(self) -> str:
        """The highest phase."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))


def sft_demand(shape: Shape, work: Workload, *, generates: Shape | None = None) -> Demand:
    """Fine-tuning: training, and answering held-out prompts. Of a pipeline `train` is the first rank's.

    `generates` is the shape that answers, where that is split over tensor groups otherwise than what is trained.
    """
    if work.pieces > 1:
        return _pipeline_demand(shape, work)
    states = _trained(shape, work)
    return Demand(
        {
            "train": _resting(states) | _training(shape, work, states),
            "generate": _resting(states) | _generating(generates or shape, work, shape),
        },
        states.host,
        states.nvme,
    )


def _pipeline_demand(shape: Shape, work: Workload) -> Demand:
    """Each piece trains by itself; held-out prompts are answered with the whole model."""
    pieces = pieces_of(shape, work.pieces)
    phases, most = dict[str, dict[str, int]](), dict[str, int]()
    for rank, piece in enumerate(pieces):
        states = _trained(piece, work)
        name = "train" if rank == 0 else f"train, piece {rank + 1}"
        phases[name] = _resting(states) | _piece_training(piece, work, states, rank)
        most = max(most, _resting(states), key=lambda owners: sum(owners.values()))
    phases["generate"] = most | _generating(shape, work, shape) | {"twin": SIZE[work.dtype] * shape.parameters}
    return Demand(phases)


def _piece_training(piece: Shape, work: Workload, states: ModelStates, rank: int) -> dict[str, int]:
    """What the micro-batches bring that are under way at once. Messages have room from the first to the last."""
    tokens, many = work.row_tokens, work.micro_batches
    is_last = rank == work.pieces - 1
    at_once = many if work.schedule == "gpipe" else min(many, work.pieces - rank)
    kept = activations(piece, tokens=tokens, length=work.max_length, dtype=work.dtype, joins=work.joins)
    again = kept.block if work.checkpointing else 0  # computed again one after the other, not at once
    behind = 0 if is_last else kept.outside  # the last norm: in front of the blocks next to nothing is kept
    each = kept.total(checkpointing=work.checkpointing) - again - behind
    message = tokens * piece.width * SIZE[work.dtype]
    sides = (rank > 0) + (not is_last)
    return {
        "gathered": states.gathered,
        "gradients": states.gradients,
        "reducing": states.passing,
        "activations": at_once * each + again,
        "messages": message * (sides * many + (0 if is_last else at_once)),
        "logits": _logits(piece, work) if is_last else 0,
    }


def reward_demand(shape: Shape, work: Workload) -> Demand:
    """The reward model: training; its head has one output."""
    states = _trained(shape, work)
    train = _resting(states) | _training(shape, work, states, logits=False)
    return Demand({"train": train}, states.host, states.nvme)


def ppo_demand(
    actor: Shape,
    critic: Shape,
    work: Workload,
    *,
    own_reference: bool = True,
    has_critic: bool = True,
    has_reward: bool = True,
    roles: Mapping[str, Workload] | None = None,
    generates: Shape | None = None,
) -> Demand:
    """PPO: actor and critic rest with their optimizers, reference and reward model in compute precision.

    `own_reference` is False where the reference is the actor under its adapters, or not asked. `critic` is the shape of
    critic and reward model; there may be no critic, and no reward model. `roles` (actor, critic, reference, reward) are
    laid out otherwise than `work` says; `generates` as in `sft_demand`.
    """
    own = {role: (roles or {}).get(role, work) for role in ("actor", "critic", "reference", "reward")}
    actors, critics = _trained(actor, own["actor"]), _trained(critic, own["critic"])
    reference, reward = _frozen(actor, own["reference"]), _frozen(critic, own["reward"])
    rest = {"actor": actors.resting, "critic": critics.resting}
    rest |= {"reference": reference.resting, "reward": reward.resting}
    if not own_reference:
        reference = ModelStates(0, 0, 0, 0, 0)
        del rest["reference"]
    if not has_critic:
        critics = ModelStates(0, 0, 0, 0, 0)
        del rest["critic"]
    if not has_reward:
        reward = ModelStates(0, 0, 0, 0, 0)
        del rest["reward"]
    answers = generates or actor
    generating = _generating(answers, own["actor"], actor)
    held = ("twin", "packs", "cache") if own["actor"].keeps else ()
    kept = rest | {owner: generating[owner] for owner in held}
    scoring = max(states.gathered for states in (reference, reward, actors, critics))
    phases = {
        "generate": rest | generating,
        "score": kept | {"gathered": scoring, "logits": _logits(actor, work)},
        "train actor": kept | _training(actor, own["actor"], actors),
    }
    if has_critic:
        phases["train critic"] = kept | _training(critic, own["critic"], critics, logits=False)
    return Demand(
        phases,
        sum(states.host for states in (actors, critics, reference, reward)),
        sum(states.nvme for states in (actors, critics, reference, reward)),
    )


def _resting(states: ModelStates) -> dict[str, int]:
    """What is held between steps."""
    return {"parameters": states.parameters + states.masters, "optimizer": states.moments}


def _trained(shape: Shape, work: Workload) -> ModelStates:
    return model_states(
        shape.parameters, root=shape.root, block=shape.block, stage=work.stage, ranks=work.ranks, dtype=work.dtype,
        trained=round(shape.parameters * work.trained_share), accumulates=work.accumulates,
        offload_optimizer=work.offload_optimizer, offload_parameters=work.offload_parameters,
        lean=work.states == "bf16", errors=work.errors,
    )  # fmt: skip


def _frozen(shape: Shape, work: Workload) -> ModelStates:
    return frozen_states(
        shape.parameters, root=shape.root, block=shape.block, stage=work.stage, ranks=work.ranks, dtype=work.dtype,
        offload_parameters=work.offload_parameters,
    )  # fmt: skip


def _training(shape: Shape, work: Workload, states: ModelStates, *, logits: bool = True) -> dict[str, int]:
    """What a micro-batch brings."""
    kept = activations(shape, tokens=work.row_tokens, length=work.max_length, dtype=work.dtype, joins=work.joins)
    return {
        "gathered": states.gathered,
        "gradients": states.gradients,
        "reducing": states.passing,
        "activations": kept.total(checkpointing=work.checkpointing),
        "logits": _logits(shape, work) if logits else 0,
    }


def _logits(shape: Shape, work: Workload) -> int:
    """A block of logits three times (they, their softmax, their gradient), and gradients of hidden states in fp32."""
    return 12 * min(work.row_tokens * shape.vocabulary, LOGIT_BLOCK) + 4 * work.row_tokens * shape.width


def _generating(shape: Shape, work: Workload, trained: Shape) -> dict[str, int]:
    """The flip's gathered weights, and the cache of the sequences that are decoded together."""
    tokens = work.rollout_batch * (work.prompt + work.answer)
    return {
        "twin": _twin(shape, work, trained),
        "packs": _packs(shape, work),
        "cache": tokens * shape.cache_per_token * SIZE[work.dtype],
        "logits": 4 * 2 * work.rollout_batch * shape.vocabulary,
    }


def _twin(shape: Shape, work: Workload, trained: Shape) -> int:
    """The weights to generate with: shared where nothing is sharded, split, cast or on the host."""
    split = trained.tensor > 1 or shape.tensor > 1
    whole = not split and work.offload_parameters == "none" and (work.stage == 0 or work.ranks == 1)
    shared = whole and (work.dtype == "fp32" or work.offload_optimizer != "none")
    return 0 if shared else SIZE[work.dtype] * shape.parameters


def _packs(shape: Shape, work: Workload) -> int:
    """Linear layers once more, as decoding reads them on CPUs (engine/rollout/packed.py)."""
    if not work.packs or work.dtype == "fp16":
        return 0
    return SIZE[work.dtype] * (shape.turned if work.in_place and work.dtype == "bf16" else shape.linear)
