"""Predict the seconds of one model on one rank from its shape, its layout and the rates of the machine.

Bytes on the network, with P parameters of d bytes and n micro-batches a step (a gather or a reduce-scatter costs half
an all-reduce): stage 0 all-reduces 4P once; stage 1 gathers dP and reduce-scatters 4P once; stage 2 gathers once and
reduce-scatters n times; stage 3 gathers 2n times and reduce-scatters n times. On a GPU communication and copies overlap
with compute, so that the longer one counts. On a CPU both use the cores, so that the times add up.
"""

import math
from dataclasses import dataclass

from engine.memory.model_shape import ModelShape
from engine.memory.rates import DISK, PCIE, Rates
from engine.memory.states import BYTES, Workload


@dataclass(frozen=True)
class CostModel:
    """Seconds of one model on one rank. `tokens` counts a tensor, sequence or pipeline group's tokens of one pass."""

    shape: ModelShape
    work: Workload
    rates: Rates
    tokens: int

    def training_seconds(self, updates: int = 1, *, head_share: float = 1.0) -> float:
        """Return the seconds of forward and backward over all tokens, in `updates` optimizer steps.

        `head_share` is the share of tokens whose log-probabilities are computed. A pipeline of p stages takes
        n + p - 1 turns for n micro-batches; `shape` is then that of one stage.
        """
        forwards = 2 if self.work.config.activation_checkpointing else 1
        compute = forwards * self._forward_seconds()
        compute += self._rank_tokens * (self._block_parameters * self.rates.backward + self._head_rate(head_share))
        compute *= 1 + (self.work.config.pipeline_parallel - 1) / self._micro_batches
        communication = self._communication_seconds(updates)
        return compute + communication if self.work.is_cpu else max(compute, communication)

    def scoring_seconds(self, *, head_share: float = 0.0) -> float:
        """Return the seconds of a forward over all tokens."""
        head = self._rank_tokens * self._head_rate(head_share) / 3  # a third of forward and backward
        return self._forward_seconds() + head + self._offloaded_read_seconds(self._micro_batches)

    def generation_seconds(self, *, steps: float, slots: int, prompt_share: float, context: float = 0.0) -> float:
        """Return the seconds of `steps` decode steps of `slots` sequences, and of the prompts' prefill.

        `context` is the mean number of tokens of a sequence in the cache, which each step reads. A step also reads
        packed weights and writes them in compute precision, which takes less than a few percent of a training pass.
        """
        number = BYTES[self.work.config.dtype]
        cache = slots * context * self.shape.cache_per_token * number
        moved = self.work.packed_bytes + number * self.work.packed + cache
        decode = self._block_parameters * self.rates.decode + slots * self.rates.head / 3 + moved * self.rates.read
        return prompt_share * self._forward_seconds() + steps * decode

    def optimizer_seconds(self) -> float:
        """Return the seconds of one optimizer step."""
        config = self.work.config
        trained = self.work.trained(self.shape) / self.work.shards
        if config.offload_optimizer == "none":
            return trained * self.rates.adam
        on_host = trained * (self.rates.host_adam + 2 * BYTES[config.dtype] * self._copy_rate)
        # Masters and two moments are read and written.
        return on_host if config.offload_optimizer == "cpu" else max(on_host, trained * 24 * DISK)

    @property
    def _rank_tokens(self) -> int:
        return math.ceil(self.tokens / self.work.config.sequence_parallel)

    @property
    def _micro_batches(self) -> int:
        return max(self.work.config.pipeline_parallel, math.ceil(self.tokens / self.work.micro_batch_tokens))

    @property
    def _block_parameters(self) -> int:
        return self.shape.blocks * self.shape.block

    @property
    def _copy_rate(self) -> float:
        return 0.0 if self.work.is_cpu else PCIE

    def _head_rate(self, share: float) -> float:
        return share * self.rates.head if self.shape.vocabulary else 0.0

    def _forward_seconds(self) -> float:
        return self._rank_tokens * self._block_parameters * self.rates.forward

    def _communication_seconds(self, updates: int) -> float:
        """Return the seconds of gathers, reductions and reads of offloaded parameters in one pass."""
        count = max(self._micro_batches, updates)
        gather = 0.5 * BYTES[self.work.config.dtype] * self.shape.parameters
        reduce = 0.5 * 4 * self.work.trained(self.shape)
        sent = (
            2 * reduce * updates,
            (gather + reduce) * updates,
            gather * updates + reduce * count,
            (2 * gather + reduce) * count,
        )[self.work.config.zero_stage]
        on_network = sent * self.rates.all_reduce if self.work.ranks > 1 else 0.0
        return on_network + 2 * self._offloaded_read_seconds(count)

    def _offloaded_read_seconds(self, count: int) -> float:
        """Return the seconds of `count` reads of this rank's offloaded parameters."""
        rate = {"none": 0.0, "cpu": self._copy_rate, "nvme": DISK}[self.work.config.offload_parameters]
        return count * rate * BYTES[self.work.config.dtype] * self.shape.parameters / self.work.shards
