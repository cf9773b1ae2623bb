"""A short measured probe: blocks of the model on this device, the optimizer, the wire, copies, the disk.

Two cuts of the model, of one block and of two, run forward and backward; the difference is a block, the rest is taken
from it. Each figure is the best of a few runs, a few seconds altogether. Left out: attention's growth with the length
beyond the probe's, and kernels that start slowly (compiled blocks).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModel

from engine.config import Precision
from engine.generation.packed import PackedLinears
from engine.kernels import token_logprobs
from engine.kernels.wide_linear import widen_linears
from engine.memory.activations import cut
from engine.memory.narrowed import narrow
from engine.memory.shapes import Shape
from engine.offload.direct_io import ScratchFile, aligned, wait
from engine.parallel import dist
from engine.precision import TORCH_DTYPE

TOKENS = {"cpu": 1024, "cuda": 4096}  # of a probing micro-batch, at most
SAMPLE = 2**23  # parameters that the optimizer is probed with: more than caches hold
BYTES = 2**22  # that the wire and copies are probed with
FILE_BYTES = 2**26
ROUNDS = 3


@dataclass(frozen=True)
class Probe:
    """Seconds: of a block's forward and backward a token, of one decoded token of all of `rows` sequences in a block
    and, `draw`, in the head; of the head's log-probabilities and their backward a token; of AdamW a parameter, on the
    device and on the host; of an all-reduce, a copy between host and device, and a read or write of the disk, a byte.
    `group_wire` is `wire` among mates; `tokens` are those of the micro-batch that was run. Blocks and head are one
    rank's share of a group's.
    """

    forward: float
    backward: float
    decode: float
    head: float
    adam: float
    host_adam: float
    wire: float
    copy: float
    disk: float
    draw: float = 0.0
    group_wire: float = 0.0
    tokens: int = 0


def probe(
    shape: Shape,
    *,
    dtype: Precision,
    length: int,
    rows: int,
    folder: str | None = None,
    generates: Shape | None = None,
    sequence: int = 1,
) -> Probe:
    """Measure; every rank calls. `length` tokens a sequence, `rows` sequences decoded together, files in `folder`.

    Every `sequence` ranks share out tokens. `generates` is the shape that decodes, where that is split otherwise than
    `shape`, which trains.
    """
    device = dist.world().device
    length = min(length, TOKENS[device.type])
    forward, backward, decode = _block(shape, dtype, length, rows, device)
    if generates is not None and generates.tensor != shape.tensor:
        _, _, decode = _block(generates, dtype, length, rows, device)
    return Probe(
        forward=forward,
        backward=backward,
        decode=decode,
        head=_head(shape, dtype, device),
        draw=_draw(generates or shape, dtype, rows, device),
        adam=_adam(device),
        host_adam=_adam(torch.device("cpu")),
        wire=_wire(device),
        copy=_copy(device),
        disk=_disk(folder),
        tokens=_sequences(device, length) * length,
        group_wire=_wire(device, mates) if (mates := shape.tensor * sequence) > 1 else 0.0,
    )


def _block(shape: Shape, dtype: Precision, length: int, rows: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds of one block: forward and backward a token, and a forward of one token of each of `rows` sequences."""
    ids = torch.zeros(_sequences(device, length), length, dtype=torch.long, device=device)
    single = torch.zeros(rows, 1, dtype=torch.long, device=device)
    found = []
    for blocks in (1, 2):
        body = _body(shape, blocks, dtype, device)

        def both(body: nn.Module = body) -> None:
            body(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()

        def forward(body: nn.Module = body, tokens: Tensor = ids) -> None:
            with torch.no_grad():
                body(input_ids=tokens, use_cache=False)

        ahead = _seconds(forward)
        with _as_generated(body, device):
            single_step = _seconds(lambda f=forward: f(tokens=single))  # type: ignore[misc]
        found.append((ahead, max(0.0, _seconds(both) - ahead), single_step))
        del body
    ahead, back, step = (max(two - one, 0.05 * two) for one, two in zip(*found, strict=True))
    return ahead / ids.numel(), back / ids.numel(), step


def _as_generated(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Linear layers as the rollout engine has them."""
    return PackedLinears(module).applied() if device.type == "cpu" else nullcontext()


def _sequences(device: torch.device, length: int) -> int:
    return max(1, TOKENS[device.type] // length)


def _body(shape: Shape, blocks: int, dtype: Precision, device: torch.device) -> nn.Module:
    """The model without its head, cut to some blocks, with one number for all weights; of a tensor group one share."""
    with init_empty_weights(include_buffers=False):
        body: Any = AutoModel.from_config(
            cut(shape.config, blocks), attn_implementation=shape.attention, dtype=TORCH_DTYPE[dtype]
        )
    if shape.tensor > 1:
        narrow(body, shape.tensor, shape.plan)
    if dtype == "fp32" and device.type == "cpu":
        widen_linears(body)  # as the engine does
    body._apply(lambda t: torch.full(t.shape, 0.01, dtype=t.dtype, device=device) if t.is_meta else t.to(device))
    return body.train()


def _head(shape: Shape, dtype: Precision, device: torch.device) -> float:
    if not shape.vocabulary:
        return 0.0
    count = TOKENS[device.type] // 4
    hidden = torch.full((count, shape.width), 0.01, dtype=TORCH_DTYPE[dtype], device=device, requires_grad=True)
    weight = torch.full(
        (shape.vocabulary, shape.width), 0.01, dtype=TORCH_DTYPE[dtype], device=device, requires_grad=True
    )
    targets = torch.zeros(count, dtype=torch.long, device=device)
    return _seconds(lambda: token_logprobs(hidden, weight, targets)[0].sum().backward()) / count


def _draw(shape: Shape, dtype: Precision, rows: int, device: torch.device) -> float:
    """The head's product for the last token of each sequence, and their probabilities."""
    if not shape.vocabulary:
        return 0.0
    hidden = torch.full((rows, shape.width), 0.01, dtype=TORCH_DTYPE[dtype], device=device)
    head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=TORCH_DTYPE[dtype], device=device)
    with torch.no_grad(), _as_generated(head, device):
        return _seconds(lambda: head(hidden).float().softmax(-1))


def _adam(device: torch.device) -> float:
    parameter = nn.Parameter(torch.zeros(SAMPLE, device=device))
    parameter.grad = torch.ones_like(parameter)
    return _seconds(torch.optim.AdamW([parameter], fused=True).step) / SAMPLE


def _wire(device: torch.device, neighbours: int | None = None) -> float:
    """Of all ranks, or of every few neighbours at the same time."""
    if dist.world().size == 1:
        return 0.0
    numbers = torch.zeros(BYTES // 4, device=device)
    group = None if neighbours is None else dist.neighbours(neighbours).get_group()
    return _seconds(lambda: dist.all_reduce_sum(numbers, group=group)) / BYTES


def _copy(device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    there = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(BYTES, dtype=torch.uint8).pin_memory()
    return _seconds(lambda: here.copy_(there)) / BYTES


def _disk(folder: str | None) -> float:
    """A file written and read as the tiers do it, past the page cache: what lies there is no disk's."""
    data, file = aligned(FILE_BYTES, torch.uint8), ScratchFile(folder, FILE_BYTES)
    began = time.perf_counter()
    wait(file.write(data, 0))
    wait(file.read(data, 0))
    seconds = time.perf_counter() - began
    file.close()
    return seconds / (2 * FILE_BYTES)


def _seconds(work: Callable[[], Any]) -> float:
    """The best of a few runs, the first of which does not count; the slowest rank's."""
    best = float("inf")
    for round_ in range(ROUNDS + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if round_:
            best = min(best, time.perf_counter() - began)
    return dist.max_over_ranks(best)
