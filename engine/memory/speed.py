"""Predict seconds by phase from a probe of a few seconds on this machine.

The probe runs a body of one block and one of two blocks forward and backward; the difference is the time of a block.
Each rate is the best of a few runs. Not measured: sequences longer than `TOKENS`, compiled blocks, and the
communication of tensor and sequence groups inside of blocks.

Bytes on the network, with P parameters of d bytes and n micro-batches a step (a gather or a reduce-scatter costs half
an all-reduce): stage 0 all-reduces 4P once; stage 1 gathers dP and reduce-scatters 4P once; stage 2 gathers once and
reduce-scatters n times; stage 3 gathers 2n times and reduce-scatters n times. On a GPU communication and copies overlap
with compute, so that the longer one counts. On a CPU both use the cores, so that the times add up.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModel

from engine.config import TORCH_DTYPE, Precision
from engine.generation.prepacked_linears import PrepackedLinears
from engine.host_memory import page_aligned
from engine.kernels import token_logprobs
from engine.kernels.products import widen_linears
from engine.memory.activations import with_blocks
from engine.memory.model_shape import ModelShape
from engine.memory.states import BYTES
from engine.memory.workload import Workload
from engine.offload.scratch_file import ScratchFile
from engine.parallel import collectives, dist

TOKENS = {"cpu": 1024, "cuda": 4096}  # the largest micro-batch of the probe
OPTIMIZER_PARAMETERS = 2**23  # larger than caches
MESSAGE_BYTES = 2**22
FILE_BYTES = 2**26
RUNS = 3


@dataclass(frozen=True)
class Probe:
    """Measured rates in seconds.

    Of a token and a block's parameter: `forward`, `backward`. Of a token: `head`, forward and backward. `decode`: one
    step of all sequences, of a block's parameter. Of a parameter: AdamW on the device (`adam`) and on the host
    (`host_adam`). Of a byte: `all_reduce`, `copy` between host and device, `disk`.
    """

    forward: float
    backward: float
    head: float
    decode: float
    adam: float
    host_adam: float
    all_reduce: float
    copy: float
    disk: float


@dataclass(frozen=True)
class CostModel:
    """Seconds of one model on one rank. `tokens` counts a tensor, sequence or pipeline group's tokens of one pass."""

    shape: ModelShape
    work: Workload
    probe: Probe
    is_gpu: bool
    tokens: int

    def training_seconds(self, updates: int = 1, *, head_share: float = 1.0) -> float:
        """Return the seconds of forward and backward over all tokens, in `updates` optimizer steps.

        `head_share` is the share of tokens whose log-probabilities are computed. A pipeline of p stages takes
        n + p - 1 turns for n micro-batches.
        """
        forwards = 2 if self.work.config.activation_checkpointing else 1
        compute = forwards * self._forward_seconds() + self._rank_tokens * (
            self._block_parameters * self.probe.backward + self._head_rate(head_share)
        )
        stages, count = self.work.config.pipeline_parallel, self._micro_batches
        compute *= (count + stages - 1) / (count * stages)
        communication = self._communication_seconds(updates) / stages
        return max(compute, communication) if self.is_gpu else compute + communication

    def scoring_seconds(self, *, head_share: float = 0.0) -> float:
        """Return the seconds of a forward over all tokens."""
        head = self._rank_tokens * self._head_rate(head_share) / 3  # a third of forward and backward
        return self._forward_seconds() + head + self._offloaded_read_seconds(self._micro_batches)

    def generation_seconds(self, *, steps: int, slots: int, prompt_share: float) -> float:
        """Return the seconds of `steps` decode steps of `slots` sequences, and of the prompts' prefill."""
        decode = self._block_parameters * self.probe.decode + slots * self.probe.head / 3
        return prompt_share * self._forward_seconds() + steps * decode

    def optimizer_seconds(self) -> float:
        """Return the seconds of one optimizer step."""
        config = self.work.config
        trained = self.work.trained(self.shape) / (self.work.shards * config.pipeline_parallel)
        if config.offload_optimizer == "none":
            return trained * self.probe.adam
        on_host = trained * (self.probe.host_adam + 2 * BYTES[config.dtype] * self.probe.copy)
        # Masters and two moments are read and written.
        return on_host if config.offload_optimizer == "cpu" else max(on_host, trained * 24 * self.probe.disk)

    @property
    def _rank_tokens(self) -> int:
        return math.ceil(self.tokens / self.work.config.sequence_parallel)

    @property
    def _micro_batches(self) -> int:
        return max(self.work.config.pipeline_parallel, math.ceil(self.tokens / self.work.micro_batch_tokens))

    @property
    def _block_parameters(self) -> int:
        return self.shape.blocks * self.shape.block

    def _head_rate(self, share: float) -> float:
        return share * self.probe.head if self.shape.vocabulary else 0.0

    def _forward_seconds(self) -> float:
        return self._rank_tokens * self._block_parameters * self.probe.forward

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
        on_network = sent * self.probe.all_reduce if self.work.ranks > 1 else 0.0
        return on_network + 2 * self._offloaded_read_seconds(count)

    def _offloaded_read_seconds(self, count: int) -> float:
        """Return the seconds of `count` reads of this rank's offloaded parameters."""
        rate = {"none": 0.0, "cpu": self.probe.copy, "nvme": self.probe.disk}[self.work.config.offload_parameters]
        return count * rate * BYTES[self.work.config.dtype] * self.shape.parameters / self.work.shards


def measure_speed(shape: ModelShape, *, dtype: Precision, length: int, rows: int, folder: str | None = None) -> Probe:
    """Measure the rates of `shape`; every rank calls. `length` tokens a sequence, `rows` sequences decode together.

    `folder` is on the disk of the NVMe tiers.
    """
    device = dist.world().device
    length = min(length, TOKENS[device.type])
    ids = torch.zeros(max(1, TOKENS[device.type] // length), length, dtype=torch.long, device=device)
    forward, backward, decode = _block_seconds(shape, dtype, ids, rows)
    return Probe(
        forward=forward,
        backward=backward,
        head=_head_seconds(shape, dtype, device) if shape.vocabulary else 0.0,
        decode=decode,
        adam=_adam_seconds(device),
        host_adam=_adam_seconds(torch.device("cpu")),
        all_reduce=_all_reduce_seconds(device) if dist.world().size > 1 else 0.0,
        copy=_copy_seconds(device) if device.type == "cuda" else 0.0,
        disk=_disk_seconds(folder),
    )


def _block_seconds(shape: ModelShape, dtype: Precision, ids: Tensor, rows: int) -> tuple[float, float, float]:
    """Return the rates `forward`, `backward` and `decode` of a `Probe`, from token ids (sequences, length)."""
    next_ids = ids.new_zeros(rows, 1)
    times, sizes = [], []
    for blocks in (1, 2):
        body = _build_body(shape, blocks, dtype, ids.device)

        def run(tokens: Tensor, body: nn.Module = body) -> Tensor:
            return body(input_ids=tokens, use_cache=False).last_hidden_state.sum()  # type: ignore[no-any-return]

        both = _seconds(lambda run=run: run(ids).backward())  # type: ignore[misc]
        with torch.no_grad():
            forward = _seconds(lambda run=run: run(ids))  # type: ignore[misc]
            with PrepackedLinears(body).applied() if ids.device.type == "cpu" else nullcontext():
                decode = _seconds(lambda run=run: run(next_ids))  # type: ignore[misc]
        times.append((forward, max(0.0, both - forward), decode))
        sizes.append(sum(parameter.numel() for parameter in body.parameters()))
        del body, run
    forward, backward, decode = (
        max(two - one, 0.05 * two) / (sizes[1] - sizes[0]) for one, two in zip(*times, strict=True)
    )
    return forward / ids.numel(), backward / ids.numel(), decode


def _build_body(shape: ModelShape, blocks: int, dtype: Precision, device: torch.device) -> nn.Module:
    """Build the model without its head, with `blocks` blocks of constant weights."""
    with init_empty_weights(include_buffers=False):
        body: Any = AutoModel.from_config(
            with_blocks(shape.config, blocks), attn_implementation=shape.attention, dtype=TORCH_DTYPE[dtype]
        )
    if dtype == "fp32" and device.type == "cpu":
        widen_linears(body)  # as the engine does
    body._apply(lambda t: torch.full(t.shape, 0.01, dtype=t.dtype, device=device) if t.is_meta else t.to(device))
    return body.train()


def _head_seconds(shape: ModelShape, dtype: Precision, device: torch.device) -> float:
    count = TOKENS[device.type] // 4
    options: dict[str, Any] = {"dtype": TORCH_DTYPE[dtype], "device": device, "requires_grad": True}
    hidden = torch.full((count, shape.width), 0.01, **options)
    weight = torch.full((shape.vocabulary, shape.width), 0.01, **options)
    targets = torch.zeros(count, dtype=torch.long, device=device)
    return _seconds(lambda: token_logprobs(hidden, weight, targets)[0].sum().backward()) / count


def _adam_seconds(device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(OPTIMIZER_PARAMETERS, device=device))
    parameter.grad = torch.ones_like(parameter)
    return _seconds(torch.optim.AdamW([parameter], fused=True).step) / OPTIMIZER_PARAMETERS


def _all_reduce_seconds(device: torch.device) -> float:
    message = torch.zeros(MESSAGE_BYTES // 4, device=device)
    return _seconds(lambda: collectives.all_reduce_sum(message)) / MESSAGE_BYTES


def _copy_seconds(device: torch.device) -> float:
    on_device = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8).pin_memory()
    return _seconds(lambda: on_host.copy_(on_device)) / MESSAGE_BYTES


def _disk_seconds(folder: str | None) -> float:
    """Write and read a file as the NVMe tiers do, which bypasses the page cache."""
    data, file = page_aligned(FILE_BYTES, torch.uint8), ScratchFile(folder, FILE_BYTES)
    start = time.perf_counter()
    file.write(data, 0)
    file.read(data, 0)
    return (time.perf_counter() - start) / (2 * FILE_BYTES)


def _seconds(run: Callable[[], Any]) -> float:
    """Return the best time of a few runs after a warm-up run, on the slowest rank."""
    best = float("inf")
    for count in range(RUNS + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if count:
            best = min(best, time.perf_counter() - start)
    return dist.max_over_ranks(best)
