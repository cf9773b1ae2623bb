"""Seconds of a step by phase: what the probe measured, times what a setting makes a rank do.

Bytes on the wire, with P parameters in d bytes, n micro-batches a step (a gather or a reduce-scatter is half an
all-reduce): stage 0 all-reduces 4P once; stage 1 gathers dP and reduce-scatters 4P once; stage 2 gathers once and
reduce-scatters n times; stage 3 gathers 2n times and reduce-scatters n times. On a GPU the wire and the copies run
beside the compute, and the longer of the two counts; on a CPU they share the cores, and add up.

A tensor group sums a token's hidden states twice a block in forward, twice in backward and once at the head, and waits.
A sequence group exchanges (half a sum) queries, keys, values and what attention gives, in forward and in backward.
A pipeline of p pieces takes n + p - 1 turns of its slowest piece for n micro-batches; one of fewer tokens than the
probe ran is taken to need as long as that, since what a small one costs is not known.
"""

import math
from dataclasses import dataclass, replace

from engine.memory.pieces import pieces_of
from engine.memory.shapes import Shape
from engine.memory.states import SIZE
from engine.memory.workload import Workload
from engine.planning.probe import Probe

FORWARD = 1 / 3  # of a forward and its backward


@dataclass(frozen=True)
class Pace:
    """What a step does: `sequences` over all ranks, of `length` tokens at most; `passes` over them for an update.

    A rollout (PPO's) has `answer` tokens drawn a sequence, `together` sequences at a time, which are those that heads
    see. Then come forwards over all sequences, `policies` of models with a head and `scorers` of those without; with a
    `critic` two models learn.
    """

    sequences: int
    length: int
    passes: int = 1
    updates: int = 1
    critic: bool = False
    policies: int = 0
    scorers: int = 0
    answer: int = 0
    together: int = 1


def step_seconds(
    shape: Shape, work: Workload, pace: Pace, found: Probe, *, on_gpu: bool, critic: Shape | None = None
) -> dict[str, float]:
    """Seconds by phase of one step (PPO: one rollout and the updates on it), at full length.

    `critic` is the shape of critic and reward model, which the probe has not run: by its size beside the policy's.
    """
    tokens = math.ceil(pace.sequences * work.sequence / work.ranks) * pace.length  # of a rank, or a group
    count = _micro_batches(work, tokens)
    tokens = math.ceil(tokens / work.sequence)
    if work.pieces > 1:
        turns = (count + work.pieces - 1) / count * max(1.0, found.tokens * count / tokens)
        pieces = [_compute(piece, work, found, tokens) for piece in pieces_of(shape, work.pieces)]
        sent = max(_beside(piece, work, found, count, 1) for piece in pieces_of(shape, work.pieces))
        between = tokens * shape.width * SIZE[work.dtype] * found.wire  # an activation, its gradient: half a sum each
        slowest = turns * (max(pieces) + between)
        learns = max(_optimizer(piece, work, found) for piece in pieces_of(shape, work.pieces))
        return {"train": max(slowest, sent) if on_gpu else slowest + sent, "step": learns}
    judge = critic or shape
    found = replace(found, head=found.head * (pace.answer / pace.length if pace.answer else 1.0))
    theirs = _resized(found, judge.block / shape.block)
    phases: dict[str, float] = {}
    if pace.answer:
        waves = math.ceil(pace.sequences / work.ranks / pace.together)
        prompts = _forward(shape, work, found, tokens) * (1 - pace.answer / pace.length)
        phases["generate"] = prompts + waves * pace.answer * (shape.blocks * found.decode + found.draw)
    if pace.policies + pace.scorers:
        own = _forward(shape, work, found, tokens) + FORWARD * found.head * tokens + _stream(shape, work, found, count)
        other = _forward(judge, work, theirs, tokens) + _stream(judge, work, found, count)
        phases["score"] = pace.policies * own + pace.scorers * other
    learning = [(shape, work, found)]
    if pace.critic:
        learning.append((judge, replace(work, adapters=0), theirs))
    phases["train"] = phases["step"] = 0.0
    for model, layout, rates in learning:
        compute = _compute(model, layout, rates, tokens)
        beside = _beside(model, layout, rates, count, pace.updates)
        phases["train"] += pace.passes * (max(compute, beside) if on_gpu else compute + beside)
        phases["step"] += pace.passes * pace.updates * _optimizer(model, layout, rates)
    return phases


def _resized(found: Probe, by: float) -> Probe:
    """The rates of blocks of another size."""
    return replace(found, forward=by * found.forward, backward=by * found.backward, decode=by * found.decode)


def _forward(shape: Shape, work: Workload, found: Probe, tokens: int) -> float:
    return shape.blocks * tokens * (found.forward + _inside(shape, work, found))


def _compute(shape: Shape, work: Workload, found: Probe, tokens: int) -> float:
    """Forward and backward of a rank's tokens, and what a group sends meanwhile."""
    ahead = _forward(shape, work, found, tokens) * (2 if work.checkpointing else 1)
    head = found.head if shape.vocabulary else 0.0
    if shape.tensor > 1 and shape.vocabulary:
        head += (2 if work.dtype != "fp32" else 1) * _sum(shape, work, found)
    return ahead + shape.blocks * tokens * (found.backward + _inside(shape, work, found)) + head * tokens


def _inside(shape: Shape, work: Workload, found: Probe) -> float:
    """Seconds of what a token brings on the wire inside of a block, one way."""
    if work.sequence > 1:
        numbers = 2 * shape.queries + shape.cache_per_token / shape.blocks
        return 0.5 * numbers * SIZE[work.dtype] * found.group_wire
    return 2 * _sum(shape, work, found)


def _sum(shape: Shape, work: Workload, found: Probe) -> float:
    """Seconds of the sum of one token's hidden states over a tensor group."""
    return shape.width * SIZE[work.dtype] * found.group_wire


def _micro_batches(work: Workload, tokens: int) -> int:
    return max(work.pieces, math.ceil(tokens / work.micro_batch_tokens))


def _beside(shape: Shape, work: Workload, found: Probe, count: int, updates: int) -> float:
    """Seconds on the wire and of parameters that come from elsewhere, over a pass of `count` micro-batches."""
    count = max(count, updates)
    gather = 0.5 * SIZE[work.dtype] * shape.parameters
    reduce = 0.5 * 4 * work.trained(shape.parameters)
    sent = {
        0: 2 * reduce * updates,
        1: (gather + reduce) * updates,
        2: gather * updates + reduce * count,
        3: (2 * gather + reduce) * count,
    }[work.stage]
    on_wire = sent * found.wire if work.ranks > 1 else 0.0
    return on_wire + 2 * _stream(shape, work, found, count)


def _stream(shape: Shape, work: Workload, found: Probe, count: int) -> float:
    """Seconds for the parameter shards to come from host or disk, `count` times."""
    rate = {"none": 0.0, "cpu": found.copy, "nvme": found.disk}[work.offload_parameters]
    return count * rate * SIZE[work.dtype] * shape.parameters / work.shards


def _optimizer(shape: Shape, work: Workload, found: Probe) -> float:
    """Seconds of one optimizer step on a rank's shard: masters and two moments are read and written where they live."""
    learning = work.trained(shape.parameters) / work.shards
    if work.offload_optimizer == "none":
        return learning * found.adam
    there = learning * (found.host_adam + 2 * SIZE[work.dtype] * found.copy)
    return there if work.offload_optimizer == "cpu" else max(there, learning * 24 * found.disk)
