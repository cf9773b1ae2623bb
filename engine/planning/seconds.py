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
from dataclasses import dataclass

from engine.memory.pieces import pieces_of
from engine.memory.shapes import Shape
from engine.memory.stages import Workload
from engine.memory.states import SIZE
from engine.planning.probe import Probe


@dataclass(frozen=True)
class Pace:
    """What a step does: `sequences` over all ranks, of `length` tokens at most; `passes` over them for an update.

    `models` are trained a pass (PPO: actor and critic), `scored` forwards over all sequences come before them, and
    `answer` tokens are drawn a sequence, `together` sequences at a time.
    """

    sequences: int
    length: int
    passes: int = 1
    updates: int = 1
    models: int = 1
    scored: int = 0
    answer: int = 0
    together: int = 1


def step_seconds(shape: Shape, work: Workload, pace: Pace, found: Probe, *, on_gpu: bool) -> dict[str, float]:
    """Seconds by phase of one step (PPO: one rollout and the updates on it), at full length."""
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
    ahead = _forward(shape, work, found, tokens)
    phases: dict[str, float] = {}
    if pace.answer:
        waves = math.ceil(pace.sequences / work.ranks / pace.together)
        phases["generate"] = waves * pace.answer * shape.blocks * found.decode
    if pace.scored:
        phases["score"] = pace.scored * (ahead + _stream(shape, work, found, count))
    compute = _compute(shape, work, found, tokens)
    beside = _beside(shape, work, found, count, pace.updates)
    trained = pace.models * pace.passes
    phases["train"] = trained * (max(compute, beside) if on_gpu else compute + beside)
    phases["step"] = trained * pace.updates * _optimizer(shape, work, found)
    return phases


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
    reduce = 0.5 * 4 * shape.parameters * work.trained_share
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
    return count * rate * SIZE[work.dtype] * shape.parameters / work.ranks


def _optimizer(shape: Shape, work: Workload, found: Probe) -> float:
    """Seconds of one optimizer step on a rank's shard: masters and two moments are read and written where they live."""
    shards = 1 if work.stage == 0 else work.ranks
    learning = shape.parameters * work.trained_share / shards
    if work.offload_optimizer == "none":
        return learning * found.adam
    there = learning * (found.host_adam + 2 * SIZE[work.dtype] * found.copy)
    return there if work.offload_optimizer == "cpu" else max(there, learning * 24 * found.disk)
