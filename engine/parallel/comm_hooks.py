"""The collectives of FSDP2: counted, and in 8 bits if `EngineConfig.compress` says so.

ZeRO++: Wang et al., 2023, arXiv:2306.10209, sections 3.1 and 3.3. A gather sends blockwise int8 instead of the compute
precision (qwZ). A reduction exchanges blockwise int8 and sums in fp32, so each value is rounded once (qgZ in one hop).

    s = max |x| / 127 over a block        q = round(x / s)        x ~ s q,  |x - s q| <= s / 2

Gloo implements a reduce-scatter as an all-reduce. On CPUs, ranks therefore exchange their gradients (all-to-all), and
each rank sums its own part in fp32. bf16 gradients then travel in bf16, and the sum equals that of an fp32 reduction.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.fsdp import FSDPModule

from engine.config import Compress
from engine.internals import DefaultAllGather, DefaultReduceScatter
from engine.parallel import collectives, dist

BLOCK = 256  # values with one scale


def exchanges(ranks: int, compress: Compress) -> bool:
    """Return whether `ranks` shards exchange gradients instead of calling the backend's reduce-scatter."""
    return ranks > 1 and (_reduces_int8(compress) or dist.world().device.type == "cpu")


def install(unit: nn.Module, *, replicate: int, ranks: int, compress: Compress) -> None:
    """Set the collectives of an FSDP unit with `ranks` shards, of which there are `replicate` copies."""
    assert isinstance(unit, FSDPModule)
    if ranks > 1:
        unit.set_custom_all_gather(GatherInt8() if compress in ("gather8", "both") else Gather())
        exchange = ExchangeInt8(ranks) if _reduces_int8(compress) else Exchange(ranks)
        unit.set_custom_reduce_scatter(exchange if exchanges(ranks, compress) else Reduce())
    if replicate > 1:
        unit.set_all_reduce_hook(lambda reduced: collectives.count_all_reduce("reduce", reduced, replicate))


def _reduces_int8(compress: Compress) -> bool:
    return compress in ("reduce8", "both")


class Gather(DefaultAllGather):
    """The all-gather of NCCL, which overlaps with computation, or the exchange of CPU ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        if input_tensor.device.type == "cpu":
            collectives.all_gather(output_tensor, input_tensor, group)
            return None
        collectives.count_bytes("gather", output_tensor.nbytes - input_tensor.nbytes)
        with dist.observed("all_gather", input_tensor.shape):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class GatherInt8(DefaultAllGather):
    """An all-gather of blockwise int8. A rank decodes its own shard too, so that all ranks have equal weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        rows = collectives.gather_tensors(encode(input_tensor), group, kind="gather")
        for each, output in zip(rows, output_tensor.view(len(rows), -1), strict=True):
            output.copy_(decode(each, len(output)))


class Reduce(DefaultReduceScatter):
    """The reduce-scatter of the backend."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work:
        collectives.count_bytes("reduce", input_tensor.nbytes - output_tensor.nbytes)
        with dist.observed("reduce_scatter", input_tensor.shape):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


class Exchange(DefaultReduceScatter):
    """A reduce-scatter by all-to-all: each rank sums the parts that it receives, in fp32."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._output_size = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 allocates the input, then the output in the same precision. The output has to be fp32."""
        numel = int(size[0])
        is_output = numel == self._output_size
        self._output_size = 0 if is_output else numel // self._ranks
        return torch.empty(numel, dtype=torch.float32 if is_output else dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._sum_received(input_tensor.view(self._ranks, -1), output_tensor, group)
        if op == ReduceOp.AVG:
            output_tensor.div_(self._ranks)

    def _sum_received(self, rows: Tensor, output: Tensor, group: ProcessGroup) -> None:
        """Send row r of `rows` (ranks, n) to rank r; write the sum of the received rows to `output` (n,) fp32."""
        first, *others = collectives.all_to_all(rows, group, kind="reduce")
        output.copy_(first)
        for row in others:
            output += row


class ExchangeInt8(Exchange):
    """The same exchange in blockwise int8."""

    def _sum_received(self, rows: Tensor, output: Tensor, group: ProcessGroup) -> None:
        output.zero_()
        for row in collectives.all_to_all(torch.stack([encode(row) for row in rows]), group, kind="reduce"):
            output += decode(row, len(output))


def encode(values: Tensor) -> Tensor:
    """Return values (n,) as bytes: the scales of the blocks in fp32, then the int8 values of all blocks.

    A block with a non-finite value is not finite after decoding, so that the step with this gradient is skipped.
    """
    blocks = values.new_zeros(_block_count(len(values)) * BLOCK, dtype=torch.float32)
    blocks[: len(values)] = values
    blocks = blocks.view(-1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, torch.inf, 1).div_(127.0)
    codes = blocks.mul_(torch.where(scales > 0, 1.0 / scales, 0.0)[:, None]).round_().to(torch.int8).view(-1)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])


def decode(row: Tensor, count: int) -> Tensor:
    """Return the values (count,) fp32 of an encoded row of bytes."""
    border = 4 * _block_count(count)
    scales, codes = row[:border].view(torch.float32), row[border:].view(torch.int8)
    return (codes.view(-1, BLOCK) * scales[:, None]).view(-1)[:count]


def _block_count(count: int) -> int:
    return -(-count // BLOCK)
