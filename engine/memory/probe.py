"""Measure the speed of this machine for one model in a few seconds: blocks, head, optimizer, network, copies, disk.

A body of one block and one of two blocks run forward and backward; the difference is the time of a block. Each rate is
the best of a few runs. Not measured: sequences longer than `TOKENS`, and compiled blocks.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModel

from engine.config import Precision
from engine.generation.prepacked_linears import PrepackedLinears
from engine.kernels import token_logprobs
from engine.kernels.wide_linear import widen_linears
from engine.memory.activations import with_blocks
from engine.memory.model_shape import ModelShape, shrink_to_one_rank
from engine.offload.direct_io import ScratchFile, aligned, wait
from engine.parallel import dist
from engine.precision import TORCH_DTYPE

TOKENS = {"cpu": 1024, "cuda": 4096}  # the largest micro-batch of the probe
OPTIMIZER_PARAMETERS = 2**23  # larger than caches
MESSAGE_BYTES = 2**22
FILE_BYTES = 2**26
RUNS = 3


@dataclass(frozen=True)
class Probe:
    """Measured rates in seconds.

    A token: forward and backward of a block, `head` forward and backward. `decode`: one decoded token of all sequences
    in a block. A parameter: AdamW on the device (`adam`) and on the host (`host_adam`). A byte: `all_reduce`, `copy`
    between host and device, `disk`.
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


def measure_speed(
    shape: ModelShape,
    *,
    dtype: Precision,
    length: int,
    rows: int,
    folder: str | None = None,
) -> Probe:
    """Measure the rates of `shape`; every rank calls. `length` tokens a sequence, `rows` sequences decode together.

    `folder` is on the disk of the NVMe tiers.
    """
    device = dist.world().device
    length = min(length, TOKENS[device.type])
    sequences = max(1, TOKENS[device.type] // length)
    forward, backward, decode = _block_seconds(shape, dtype, sequences, length, rows, device)
    return Probe(
        forward=forward,
        backward=backward,
        head=_head_seconds(shape, dtype, device),
        decode=decode,
        adam=_adam_seconds(device),
        host_adam=_adam_seconds(torch.device("cpu")),
        all_reduce=_all_reduce_seconds(device),
        copy=_copy_seconds(device),
        disk=_disk_seconds(folder),
    )


def _block_seconds(
    shape: ModelShape, dtype: Precision, sequences: int, length: int, rows: int, device: torch.device
) -> tuple[float, float, float]:
    """Return seconds of one block: forward and backward for each token, and a decoded token of `rows` sequences."""
    ids = torch.zeros(sequences, length, dtype=torch.long, device=device)
    next_ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
    times = []
    for blocks in (1, 2):
        body = build_body(shape, blocks, dtype, device)

        def run(tokens: Tensor, body: nn.Module = body) -> Tensor:
            return body(input_ids=tokens, use_cache=False).last_hidden_state.sum()  # type: ignore[no-any-return]

        both = _seconds(lambda run=run: run(ids).backward())  # type: ignore[misc]
        with torch.no_grad():
            forward = _seconds(lambda run=run: run(ids))  # type: ignore[misc]
            with PrepackedLinears(body).applied() if device.type == "cpu" else nullcontext():
                decode = _seconds(lambda run=run: run(next_ids))  # type: ignore[misc]
        times.append((forward, max(0.0, both - forward), decode))
        del body, run
    forward, backward, decode = (max(two - one, 0.05 * two) for one, two in zip(*times, strict=True))
    return forward / ids.numel(), backward / ids.numel(), decode


def build_body(shape: ModelShape, blocks: int, dtype: Precision, device: torch.device) -> nn.Module:
    """Build the model without its head, with `blocks` blocks of constant weights: one tensor-parallel rank's share."""
    with init_empty_weights(include_buffers=False):
        body: Any = AutoModel.from_config(
            with_blocks(shape.config, blocks), attn_implementation=shape.attention, dtype=TORCH_DTYPE[dtype]
        )
    if shape.tensor > 1:
        shrink_to_one_rank(body, shape.tensor, shape.plan)
    if dtype == "fp32" and device.type == "cpu":
        widen_linears(body)  # as the engine does
    body._apply(lambda t: torch.full(t.shape, 0.01, dtype=t.dtype, device=device) if t.is_meta else t.to(device))
    return body.train()


def _head_seconds(shape: ModelShape, dtype: Precision, device: torch.device) -> float:
    if not shape.vocabulary:
        return 0.0
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
    if dist.world().size == 1:
        return 0.0
    message = torch.zeros(MESSAGE_BYTES // 4, device=device)
    return _seconds(lambda: dist.all_reduce_sum(message)) / MESSAGE_BYTES


def _copy_seconds(device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    on_device = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8).pin_memory()
    return _seconds(lambda: on_host.copy_(on_device)) / MESSAGE_BYTES


def _disk_seconds(folder: str | None) -> float:
    """Write and read a file as the NVMe tiers do, which bypasses the page cache."""
    data, file = aligned(FILE_BYTES, torch.uint8), ScratchFile(folder, FILE_BYTES)
    start = time.perf_counter()
    wait(file.write(data, 0))
    wait(file.read(data, 0))
    seconds = time.perf_counter() - start
    file.close()
    return seconds / (2 * FILE_BYTES)


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
