"""Predict seconds of forwards, backwards, optimizer steps and generation from a probe.

Bytes on the network, with P parameters of d bytes and n micro-batches a step (a gather or a reduce-scatter costs half
an all-reduce): stage 0 all-reduces 4P once; stage 1 gathers dP and reduce-scatters 4P once; stage 2 gathers once and
reduce-scatters n times; stage 3 gathers 2n times and reduce-scatters n times. On a GPU communication and copies overlap
with compute, so that the longer one counts. On a CPU both use the cores, so that the times add up.

Inside each block a tensor group sums a token's hidden states twice forward and twice backward; a sequence
group exchanges queries, keys, values and the attention output. A pipeline of p stages takes n + p - 1 turns of
its slowest stage for n micro-batches.
"""

import math
from dataclasses import dataclass, replace

from engine.memory.model_shape import ModelShape, pipeline_stages
from engine.memory.probe import Probe
from engine.memory.states import BYTES
from engine.memory.workload import Workload


@dataclass(frozen=True)
class CostModel:
    """Seconds of one model on one rank. `tokens` counts a tensor, sequence or pipeline group's tokens of one pass.

    The rates of blocks scale with `relative_size`, the size of a block relative to the probed one.
    """

    shape: ModelShape
    work: Workload
    probe: Probe
    is_gpu: bool
    tokens: int
    relative_size: float = 1.0

    def training_seconds(self, updates: int = 1, *, head_share: float = 1.0) -> float:
        """Return the seconds of forward and backward over all tokens, in `updates` optimizer steps.

        `head_share` is the share of tokens whose log-probabilities are computed.
        """
        ranks = self.work.config.pipeline_parallel
        if ranks > 1:
            return self._pipeline_seconds(ranks)
        compute = self._compute_seconds(head_share)
        return self._overlapped(compute, self._communication_seconds(updates))

    def scoring_seconds(self, *, head_share: float = 0.0) -> float:
        """Return the seconds of a forward over all tokens."""
        head = head_share * self.probe.head / 3 if self.shape.vocabulary else 0.0  # a third of forward and backward
        return self._forward_seconds() + self._rank_tokens * head + self._offloaded_read_seconds()

    def generation_seconds(self, *, steps: int, slots: int, prompt_share: float) -> float:
        """Return the seconds of `steps` decode steps of `slots` sequences, and of the prompts' prefill."""
        decode = self.shape.blocks * self.probe.decode + slots * self.probe.head / 3
        return prompt_share * self._forward_seconds() + steps * decode

    def optimizer_seconds(self) -> float:
        """Return the seconds of one optimizer step."""
        work = self.work
        if work.config.pipeline_parallel > 1:
            single = replace(work, config=replace(work.config, pipeline_parallel=1))
            stages = pipeline_stages(self.shape, work.config.pipeline_parallel)
            return max(replace(self, shape=stage, work=single).optimizer_seconds() for stage in stages)
        trained = work.trained(self.shape.parameters) / work.shards
        if work.config.offload_optimizer == "none":
            return trained * self.probe.adam
        on_host = trained * (self.probe.host_adam + 2 * BYTES[work.config.dtype] * self.probe.copy)
        # Masters and two moments are read and written.
        return on_host if work.config.offload_optimizer == "cpu" else max(on_host, trained * 24 * self.probe.disk)

    @property
    def _rank_tokens(self) -> int:
        return math.ceil(self.tokens / self.work.config.sequence_parallel)

    @property
    def _micro_batches(self) -> int:
        return max(self.work.config.pipeline_parallel, math.ceil(self.tokens / self.work.micro_batch_tokens))

    def _overlapped(self, compute: float, communication: float) -> float:
        return max(compute, communication) if self.is_gpu else compute + communication

    def _forward_seconds(self) -> float:
        per_token = self.relative_size * self.probe.forward + self._group_seconds()
        return self.shape.blocks * self._rank_tokens * per_token

    def _compute_seconds(self, head_share: float = 1.0) -> float:
        forwards = 2 if self.work.config.activation_checkpointing else 1
        backward = self.relative_size * self.probe.backward + self._group_seconds()
        head = head_share * self.probe.head if self.shape.vocabulary else 0.0
        return forwards * self._forward_seconds() + self._rank_tokens * (self.shape.blocks * backward + head)

    def _group_seconds(self) -> float:
        """Return the seconds that a token's communication takes inside of a block, in one direction."""
        if self.work.config.sequence_parallel > 1:
            numbers = 2 * self.shape.queries + self.shape.cache_per_token / self.shape.blocks
            return 0.5 * numbers * BYTES[self.work.config.dtype] * self.probe.all_reduce
        return 2 * self._hidden_state_seconds() if self.shape.tensor > 1 else 0.0

    def _hidden_state_seconds(self) -> float:
        return self.shape.width * BYTES[self.work.config.dtype] * self.probe.all_reduce

    def _communication_seconds(self, updates: int) -> float:
        """Return the seconds of gathers, reductions and reads of offloaded parameters in one pass."""
        count = max(self._micro_batches, updates)
        gather = 0.5 * BYTES[self.work.config.dtype] * self.shape.parameters
        reduce = 0.5 * 4 * self.work.trained(self.shape.parameters)
        sent = (
            2 * reduce * updates,
            (gather + reduce) * updates,
            gather * updates + reduce * count,
            (2 * gather + reduce) * count,
        )[self.work.config.zero_stage]
        on_network = sent * self.probe.all_reduce if self.work.ranks > 1 else 0.0
        return on_network + 2 * self._offloaded_read_seconds(count)

    def _offloaded_read_seconds(self, count: int | None = None) -> float:
        rate = {"none": 0.0, "cpu": self.probe.copy, "nvme": self.probe.disk}[self.work.config.offload_parameters]
        size = BYTES[self.work.config.dtype] * self.shape.parameters / self.work.shards
        return (self._micro_batches if count is None else count) * rate * size

    def _pipeline_seconds(self, ranks: int) -> float:
        """Return the seconds of all turns."""
        single = replace(self.work, config=replace(self.work.config, pipeline_parallel=1))
        stages = [replace(self, shape=stage, work=single) for stage in pipeline_stages(self.shape, ranks)]
        count = self._micro_batches
        turns = (count + ranks - 1) / count
        slowest = max(stage._compute_seconds() for stage in stages)
        slowest += self._rank_tokens * self._hidden_state_seconds()  # an activation and its gradient, half a sum each
        return self._overlapped(turns * slowest, max(stage._communication_seconds(1) for stage in stages))
