"""What each stage of the pipeline needs of a device, by owner: states, activations, logits, cache, the models of PPO.

Heights are added where things live at the same time: all models rest, one of them works, on one micro-batch. The pieces
of a pipeline work on several: the first of P on P of them, the last on one; with all forwards first each on all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.kernels.token_logprobs import BLOCK_ELEMENTS
from engine.memory.activations import activations
from engine.memory.generation import generating
from engine.memory.pieces import pieces_of
from engine.memory.shapes import Shape
from engine.memory.states import SIZE, ModelStates, frozen_states, model_states
from engine.memory.workload import Workload


@dataclass(frozen=True)
class Demand:
    """Bytes of a rank by owner, the most in each phase: on its device, and `elsewhere`, as "host" and "nvme".

    What of a phase's owners is not there at the same time is in `overlaps`. `shared` says that PPO's forwards are kept
    from scoring to the first update (engine/shared_forward.py).
    """

    phases: dict[str, dict[str, int]]
    elsewhere: dict[str, dict[str, int]] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)
    shared: bool = False

    def height(self, phase: str) -> int:
        """Bytes on the device at the height of a phase."""
        return sum(self.phases[phase].values()) - self.overlaps.get(phase, 0)

    @property
    def everywhere(self) -> dict[str, dict[str, int]]:
        """`phases`, with what is on the host and in files beside what is on the device."""
        return {phase: owners | self.elsewhere.get(phase, {}) for phase, owners in self.phases.items()}

    @property
    def host(self) -> int:
        """The most in host memory."""
        return max((found.get("host", 0) for found in self.elsewhere.values()), default=0)

    @property
    def nvme(self) -> int:
        """The most in files."""
        return max((found.get("nvme", 0) for found in self.elsewhere.values()), default=0)

    @property
    def peak(self) -> int:
        """The height of the highest phase."""
        return self.height(self.worst)

    @property
    def worst(self) -> str:
        """The highest phase."""
        return max(self.phases, key=self.height)


def sft_demand(shape: Shape, work: Workload, *, generates: Shape | None = None) -> Demand:
    """Fine-tuning: training, and answering held-out prompts. Of a pipeline `train` is the first rank's.

    `generates` is the shape that answers, where that is split over tensor groups otherwise than what is trained.
    """
    if work.pieces > 1:
        return _pipeline_demand(shape, work)
    states = _trained(shape, work)
    rest = _resting(states)
    phases = {
        "train": rest | _training(shape, work, states),
        "score": rest | _scoring([states]) | {"logits": _scored_logits(shape, work)},
        "generate": rest | generating(generates or shape, work, shape, rest),
    }
    away = {phase: _away([states], trains=states if phase == "train" else None) for phase in phases}
    return Demand(phases, away, {"train": states.overlap})


def _pipeline_demand(shape: Shape, work: Workload) -> Demand:
    """Each piece trains by itself; held-out prompts are answered with the whole model."""
    pieces = pieces_of(shape, work.pieces)
    phases, most, overlaps = dict[str, dict[str, int]](), dict[str, int](), dict[str, int]()
    for rank, piece in enumerate(pieces):
        states = _trained(piece, replace(work, adapters=work.adapters * piece.blocks // shape.blocks))
        name = "train" if rank == 0 else f"train, piece {rank + 1}"
        phases[name] = _resting(states) | _piece_training(piece, work, states, rank)
        overlaps[name] = states.overlap
        most = max(most, _resting(states), key=lambda owners: sum(owners.values()))
    whole = {"twin": SIZE[work.dtype] * shape.parameters}
    phases["generate"] = most | generating(shape, work, shape, most | whole) | whole
    return Demand(phases, overlaps=overlaps)


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
        "activations": at_once * each,
        "recomputed": again,
        "messages": message * (sides * many + (0 if is_last else at_once)),
        "logits": _logits(piece, work) if is_last else 0,
    }


def reward_demand(shape: Shape, work: Workload) -> Demand:
    """The reward model: training, and scoring held-out pairs; its head has one output."""
    states = _trained(shape, work)
    rest = _resting(states)
    phases = {
        "train": rest | _training(shape, work, states, logits=False),
        "score": rest | _scoring([states]),
    }
    away = {phase: _away([states], trains=states if phase == "train" else None) for phase in phases}
    return Demand(phases, away, {"train": states.overlap})


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
    shared: bool = False,
) -> Demand:
    """PPO: actor and critic rest with their optimizers, reference and reward model in compute precision.

    `own_reference` is False where the reference is the actor under its adapters, or not asked. `critic` is the shape of
    critic and reward model; there may be no critic, and no reward model. `roles` (actor, critic, reference, reward) are
    laid out otherwise than `work` says; `generates` as in `sft_demand`. `shared` keeps the forwards of all of a step's
    micro-batches, the critic's while the actor learns.
    """
    own = {role: (roles or {}).get(role, work) for role in ("actor", "critic", "reference", "reward")}
    learns = replace(own["critic"], adapters=0, averages=False, mixes=False)  # those are the actor's
    models = {
        "actor": _trained(actor, own["actor"]),
        "critic": _trained(critic, learns),
        "reference": _frozen(actor, own["reference"]),
        "reward": _frozen(critic, own["reward"]),
    }
    here = {"actor": True, "critic": has_critic, "reference": own_reference, "reward": has_reward}
    models = {role: states for role, states in models.items() if here[role]}
    actors, critics = models["actor"], models.get("critic")
    rest = {role: states.resting for role, states in models.items()}
    answering = rest
    if own["actor"].parks:
        answering = rest | {"actor": actors.resting - actors.moments}
    made = generating(generates or actor, own["actor"], actor, answering)
    kept = rest | {owner: made[owner] for owner in ("twin", "packs", "cache") if own["actor"].keeps}
    phases = {
        "generate": answering | made,
        "score": kept | _scoring([*models.values()]) | {"logits": _scored_logits(actor, work)},
        "train actor": kept | _training(actor, own["actor"], actors, held=shared and not work.mixes),
    }
    training = {"train actor": actors}
    if critics is not None:
        phases["train critic"] = kept | _training(critic, learns, critics, logits=False, held=shared)
        training["train critic"] = critics
        if shared:  # between forward and backward blocks are not gathered at stage 3
            waits = SIZE[learns.dtype] * critic.root if learns.stage == 3 else critics.gathered
            phases["train actor"]["gathered"] += min(waits, critics.gathered)
            phases["train actor"]["activations"] += phases["train critic"]["activations"]
    away = {phase: _away([*models.values()], trains=training.get(phase)) for phase in phases}
    if own["actor"].parks and actors.moments:
        away["generate"]["host"] = away["generate"].get("host", 0) + actors.moments
    return Demand(phases, away, {phase: states.overlap for phase, states in training.items()}, shared)


def _away(models: Sequence[ModelStates], *, trains: ModelStates | None) -> dict[str, int]:
    """What all models have on the host and in files; gradients are there of the one that trains."""
    host = sum(states.host - (0 if states is trains else states.host_gradients) for states in models)
    found = {"host": host, "nvme": sum(states.nvme for states in models)}
    return {place: size for place, size in found.items() if size}


def _resting(states: ModelStates) -> dict[str, int]:
    """What is held between steps."""
    held = {"parameters": states.parameters + states.masters, "optimizer": states.moments}
    return held | ({"average": states.average} if states.average else {})


def _trained(shape: Shape, work: Workload) -> ModelStates:
    states = model_states(
        shape.parameters + work.adapters,
        root=shape.root,
        block=shape.block,
        stage=work.stage,
        ranks=work.ranks,
        shards=work.shards,
        alone=_alone(shape, work),
        dtype=work.dtype,
        trained=work.trained(shape.parameters),
        accumulates=work.accumulates,
        moments=work.moments,
        averages=work.averages,
        offload_optimizer=work.offload_optimizer,
        offload_parameters=work.offload_parameters,
        ratio=work.offload_ratio,
        sub_group=work.sub_group,
        lean=work.states == "bf16",
        errors=work.errors,
    )
    if not work.on_cpu or work.offload_optimizer == "none":
        return states
    # The share of an offloaded optimizer that stays with the device is on the host all the same.
    reduced = 0 if work.accumulates and work.stage < 2 else states.gradients
    here = states.masters + states.moments + states.average + reduced
    return replace(
        states,
        masters=0,
        moments=0,
        average=0,
        gradients=states.gradients - reduced,
        host=states.host + here,
        host_gradients=states.host_gradients + reduced,
    )


def _alone(shape: Shape, work: Workload) -> bool:
    return work.ranks == 1 and shape.tensor == 1


def _frozen(shape: Shape, work: Workload) -> ModelStates:
    return frozen_states(
        shape.parameters,
        root=shape.root,
        block=shape.block,
        stage=work.stage,
        ranks=work.ranks,
        shards=work.shards,
        alone=_alone(shape, work),
        dtype=work.dtype,
        offload_parameters=work.offload_parameters,
    )


def _training(
    shape: Shape, work: Workload, states: ModelStates, *, logits: bool = True, held: bool = False
) -> dict[str, int]:
    """What a micro-batch brings; `held` are the forwards of all of a step's."""
    many = work.micro_batches if held else 1
    kept = activations(
        shape,
        tokens=work.row_tokens,
        length=work.max_length,
        dtype=work.dtype,
        joins=work.joins,
        copied=work.copied_tokens,
    )
    again = kept.block if work.checkpointing else 0
    return {
        "gathered": states.gathered - states.ahead,
        "ahead": states.ahead,
        "gradients": states.gradients,
        "reducing": states.passing,
        "activations": many * (kept.total(checkpointing=work.checkpointing) - again),
        "recomputed": again,
        "logits": _logits(shape, work) if logits else 0,
    }


def _scoring(models: Sequence[ModelStates]) -> dict[str, int]:
    """What a forward gathers, of the model that gathers most."""
    most = max(models, key=lambda states: states.scoring)
    return {"gathered": most.scoring - most.ahead, "ahead": most.ahead}


def _scored_logits(shape: Shape, work: Workload) -> int:
    """A block of logits, and their softmax."""
    return 8 * _logits_at_once(shape, work)


def _logits(shape: Shape, work: Workload) -> int:
    """A block of logits three times (they, their softmax, their gradient), and gradients of hidden states in fp32."""
    return 12 * _logits_at_once(shape, work) + 4 * work.row_tokens * shape.width


def _logits_at_once(shape: Shape, work: Workload) -> int:
    """How many of a micro-batch's logits exist at a time."""
    return min(work.row_tokens * shape.vocabulary, BLOCK_ELEMENTS["cpu" if work.on_cpu else "cuda"])
