"""How models are laid out over ranks, and what they are fed: what a prediction is made for."""

import math
from dataclasses import dataclass
from typing import Literal

from engine.config import EngineConfig, PipelineSchedule, Precision, Tier


@dataclass(frozen=True)
class Workload:
    """How models are laid out and fed. Lengths are tokens; `rollout_batch` sequences are decoded together, of `answers`
    (0: so many) in a round, `samples` to a prompt.

    `ranks` share a model's states, or every `shard_ranks` of them; ranks of a tensor group count once, and their shapes
    are narrower. Every `sequence` of them share out the tokens of a micro-batch. `states`, `offload_ratio` and
    `sub_group` as in EngineConfig; `errors` are 1-bit Adam's, `moments` the fp32 values that the optimizer keeps of a
    parameter. `adapters` are parameters beside a frozen model (0: all of it is trained), over `adapted` of its weights.
    `averages` says that a moving average of the actor is kept, `mixes` that its steps have other text beside (PPO-ptx).

    `on_cpu` says that the device is the host: what rests there is at hand for generating, and linear layers are laid
    out for it; with `in_place` those in bf16 are read where they lie, which needs a copy of the turned ones alone. A
    pipeline deals a model out in `pieces`, which `ranks` does not count; `step_tokens` are a rank's of a step (0:
    many). `joins` is that of engine/memory/activations.py. `sides` sequences stay in one micro-batch, however small it
    is: the two of a pair, which share a prompt; with `copies` attention lays out that one's keys and values once more
    for each of them.

    What PPO generates with is held while it trains where it `keeps` that; with `streams` blocks come one at a time, and
    with `parks` the optimizer's moments are on the host meanwhile. The cache takes `cache_bytes` at most, or half of
    what is free of `room`, but has place for `least` sequences; without either it is as large as is asked for.
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
    answers: int = 0
    samples: int = 1
    shard_ranks: int | None = None
    offload_ratio: float = 1.0
    sub_group: int = EngineConfig.sub_group_size
    moments: int = 2
    adapters: int = 0
    adapted: int = 0
    averages: bool = False
    states: Literal["fp32", "bf16"] = "fp32"
    errors: bool = False
    on_cpu: bool = False
    in_place: bool = False
    joins: bool = False
    sides: int = 1
    copies: bool = False
    pieces: int = 1
    schedule: PipelineSchedule = "1f1b"
    step_tokens: int = 0
    mixes: bool = False
    sequence: int = 1
    keeps: bool = True
    streams: bool = False
    parks: bool = False
    cache_bytes: int | None = None
    room: int | None = None
    least: int = 8

    @property
    def least_tokens(self) -> int:
        """Of a micro-batch of the longest sequences: it is not cut below that."""
        return self.sides * self.max_length

    @property
    def row_tokens(self) -> int:
        """Of a micro-batch, at most, on one rank."""
        return math.ceil(max(self.micro_batch_tokens, self.least_tokens) / self.sequence)

    @property
    def copied_tokens(self) -> int:
        """How many a micro-batch's prompts have in such copies, where answers fill up `max_length`."""
        if not self.copies:
            return 0
        prompt = min(self.prompt, self.max_length - 1)
        return self.row_tokens * self.sides * prompt // (self.least_tokens - (self.sides - 1) * prompt)

    @property
    def micro_batches(self) -> int:
        """Of a step; a pipeline has one for each piece at least."""
        return max(self.pieces, math.ceil(self.step_tokens / self.micro_batch_tokens))

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.step_tokens == 0 or self.micro_batches > 1 or self.mixes

    @property
    def shards(self) -> int:
        """Parts that a model's states are in."""
        return 1 if self.stage == 0 else self.shard_ranks or self.ranks

    def trained(self, parameters: int) -> int:
        """Of a model with so many parameters, those that learn."""
        return self.adapters or parameters
