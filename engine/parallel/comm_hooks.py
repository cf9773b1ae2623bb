"""What FSDP2 sends: its gathers and reductions, counted, in 8 bits where that is asked for.

8 bits are ZeRO++'s (Wang et al., 2023, arXiv:2306.10209): gathers send blockwise int8 instead of the compute precision
(qwZ), reductions exchange blockwise int8 and add up in fp32, so that a number is rounded once and not at every hop
(qgZ, in one hop). Every rank decodes its own shard too: all compute with the same weights.

Gloo has no reduce-scatter: what goes by that name all-reduces everything and keeps a part. On a CPU gradients are
exchanged instead (all-to-all) and each rank adds up its own part, in fp32. Gradients in bf16 then travel in bf16, half
the bytes, and the sum is the same as that of a reduction in fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# The interfaces of what `set_custom_all_gather` takes; they have no public name yet, the same from torch 2.11 to 2.13.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from engine.config import Compress
from engine.parallel import dist, int8
from engine.parallel import mailbox as mailboxes
from engine.parallel.comm_stats import count, count_all_reduce
from engine.parallel.mailbox import Mailbox

SUM_BLOCK = 2**17  # numbers added up at once, so that they stay in the cache


@dataclass(frozen=True)
class Sending:
    """How one module's units talk on a mesh (replicate, shard)."""

    replicate: int
    shard: int
    compress: Compress

    @property
    def exchanges(self) -> bool:
        """Whether gradients are exchanged, rather than reduced by the backend."""
        return self.shard > 1 and (self.reduces_8 or dist.world().device.type == "cpu")

    @property
    def gathers_8(self) -> bool:
        return self.compress in ("gather8", "both")

    @property
    def reduces_8(self) -> bool:
        return self.compress in ("reduce8", "both")


def reducing(policy: MixedPrecisionPolicy, sending: Sending, *, each_micro_batch: bool) -> MixedPrecisionPolicy:
    """Leave bf16 gradients as they are where they are exchanged; they are added up in fp32 all the same.

    Not where micro-batches are added up before the exchange: FSDP2 does that in the precision of the reduction.
    """
    if sending.exchanges and each_micro_batch and policy.param_dtype == torch.bfloat16:
        return replace(policy, reduce_dtype=torch.bfloat16)
    return policy


def install(unit: nn.Module, sending: Sending) -> None:
    """Give an FSDP unit its collectives."""
    assert isinstance(unit, FSDPModule)
    if sending.shard > 1:
        gather, exchange = Gather8 if sending.gathers_8 else Gather, Exchange8 if sending.reduces_8 else Exchange
        together = sending.shard == dist.world().size
        mailbox = mailboxes.of_world() if together else None
        unit.set_custom_all_gather(gather(mailbox))
        unit.set_custom_reduce_scatter(exchange(sending.shard, mailbox) if sending.exchanges else Reduce())
    if sending.replicate > 1:
        unit.set_all_reduce_hook(lambda reduced: count_all_reduce("reduce", reduced, sending.replicate))


class _Plain:
    """Buffers of their own for each call."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Plain, AllGather):
    """The backend's all-gather, or the host's shared memory."""

    def __init__(self, mailbox: Mailbox | None = None) -> None:
        self._mailbox = mailbox

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        count("gather", input_tensor.nbytes * (group.size() - 1))
        if self._mailbox is not None:
            self._mailbox.gather(output_tensor, input_tensor, group)
            return None
        return dist.all_gather(output_tensor, input_tensor, group, async_op=async_op)


class Gather8(Gather):
    """An all-gather of blockwise int8."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        numbers, ranks = len(input_tensor), group.size()
        rows = input_tensor.new_empty(ranks, int8.row_bytes(numbers), dtype=torch.uint8)
        int8.encode(input_tensor, rows[group.rank()])
        super().__call__(rows.view(-1), rows[group.rank()], group)
        for row, out in zip(rows, output_tensor.view(ranks, numbers), strict=True):
            int8.decode(row, out)


class Reduce(_Plain, ReduceScatter):
    """The backend's reduce-scatter."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        count("reduce", output_tensor.nbytes * (group.size() - 1))
        return dist.reduce_scatter(output_tensor, input_tensor, group, op, async_op=async_op)


class Exchange(ReduceScatter):
    """Every rank sends each other one its part; each adds up what it got, in fp32."""

    def __init__(self, ranks: int, mailbox: Mailbox | None = None) -> None:
        self._ranks, self._mailbox = ranks, mailbox
        self._part = 0  # size of the output that is asked for next

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, then for the output, a part of it in the same precision: that one is fp32."""
        numbers = int(size[0])
        if numbers == self._part:
            self._part = 0
            return torch.empty(numbers, dtype=torch.float32, device=device)
        self._part = numbers // self._ranks
        return torch.empty(numbers, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        parts = input_tensor.view(self._ranks, -1)
        self.sum_up(parts, output_tensor, group)
        if op == ReduceOp.AVG:
            output_tensor.div_(self._ranks)

    def sum_up(self, parts: Tensor, out: Tensor, group: ProcessGroup) -> None:
        """parts (ranks, numbers): what each rank shall get. out (numbers,) fp32: the sum of what this one got."""
        for start, end, received in self.exchanged(parts, group):
            for first in range(0, end - start, SUM_BLOCK):
                total = out[start + first : min(start + first + SUM_BLOCK, end)]
                total.copy_(received[0][first : first + SUM_BLOCK])
                for part in received[1:]:
                    total += part[first : first + SUM_BLOCK]

    def exchanged(self, rows: Tensor, group: ProcessGroup) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
        """Row r goes to rank r of the group. Yields (start, end, what each rank sent here of start..end), in order."""
        count("reduce", rows[0].nbytes * (len(rows) - 1))
        if self._mailbox is not None:
            yield from self._mailbox.exchange(rows, group)
            return
        received = torch.empty_like(rows)
        dist.all_to_all(received, rows, group)
        yield 0, rows.shape[1], list(received)


class Exchange8(Exchange):
    """The same in blockwise int8."""

    def sum_up(self, parts: Tensor, out: Tensor, group: ProcessGroup) -> None:
        rows = parts.new_empty(len(parts), int8.row_bytes(parts.shape[1]), dtype=torch.uint8)
        for part, row in zip(parts, rows, strict=True):
            int8.encode(part, row)
        received = torch.empty_like(rows)
        for start, end, pieces in self.exchanged(rows, group):
            for row, piece in zip(received, pieces, strict=True):
                row[start:end] = piece
        out.zero_()
        for row in received:
            int8.decode(row, out, add=True)
