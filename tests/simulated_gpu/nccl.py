"""The backend that replaces NCCL between simulated devices: collectives on their own stream, over Gloo.

As with NCCL, a collective starts when the current stream reaches it, and `wait` blocks a stream, not the host. The
simulation detects a stream that reads a result too early. Ranks exchange bytes over Gloo; sums are computed here in the
precision of the tensors. A received tensor has its values only after `wait`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "simulated"
_ops = torch.ops.simulated
REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: _sum(parts),
    dist.ReduceOp.AVG: lambda parts: _sum(parts) / len(parts),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
}


def _sum(parts: Tensor) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Done(dist.Work):
    """A collective on a stream. `wait` makes the current stream wait, not the host."""

    def __init__(self, event: torch.Event, result: list[Tensor]) -> None:
        super().__init__()
        self.event, self.tensors = event, result

    def wait(self, timeout: Any = None) -> bool:
        self.event.wait(torch.cuda.current_stream())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self.tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class _Sent(_Done):
    """A send in flight. Gloo transfers the tensors when the receiver has posted its receive."""

    def __init__(self, done: _Done, carried: dist.Work, buffers: list[Tensor]) -> None:
        super().__init__(done.event, done.tensors)
        self.carried, self.buffers = carried, buffers

    def wait(self, timeout: Any = None) -> bool:
        self.carried.wait()
        return super().wait()


class _Received(_Sent):
    """A receive in flight. The tensors get their values in `wait`."""

    def wait(self, timeout: Any = None) -> bool:
        super().wait()
        for tensor, arrived in zip(self.tensors, self.buffers, strict=True):
            _host(tensor).copy_(arrived)
        return True


class Group(dist.ProcessGroup):
    """A process group for tensors on a simulated device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.ranks = size
        self.carrier = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.stream: Any = None

    @property
    def group_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    pg_name = group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]  # objects travel as tensors on the device

    def getBackendName(self) -> str:
        return NAME

    def _run(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], work: Callable[[], None]) -> _Done:
        """Do `work` on host memory, and record it as one launch on this group's stream. As NCCL, refuse CPU tensors."""
        (device,) = {t.device for t in (*read, *written)}
        assert device.type == "cuda", "No backend type associated with device type cpu"
        assert all(t.is_contiguous() for t in (*read, *written)), "Tensors must be contiguous"
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            _ops.touch(list(read), list(written), name)
            work()
            event = self.stream.record_event()
        return _Done(event, list(written))

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks: (ranks, ...)."""
        sent = _host(tensor).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.ranks)]
        source, targets = sent.reshape(-1).view(torch.uint8), [part.reshape(-1).view(torch.uint8) for part in parts]
        self.carrier.allgather([targets], [source]).wait()
        return torch.stack(parts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        reduction = _reduction(opts)

        def work() -> None:
            for tensor in tensors:
                _host(tensor).copy_(reduction(self._gathered(tensor)))

        return self._run("all_reduce", tensors, tensors, work)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return self.allreduce(tensors, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Done:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> _Done:
        def work() -> None:
            for output, tensor in zip(outputs, tensors, strict=True):
                _host(output).view(-1).copy_(self._gathered(tensor).view(-1))

        return self._run("all_gather", tensors, outputs, work)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> _Done:
        def work() -> None:
            for parts, tensor in zip(outputs, tensors, strict=True):
                for part, gathered in zip(parts, self._gathered(tensor), strict=True):
                    _host(part).copy_(gathered)

        return self._run("all_gather", tensors, [part for parts in outputs for part in parts], work)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> _Done:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> _Done:
        reduction = _reduction(opts)

        def work() -> None:
            for output, whole in zip(outputs, wholes, strict=True):
                parts = self._gathered(whole).view(self.ranks, self.ranks, -1)[:, self.rank()]
                _host(output).view(-1).copy_(reduction(parts))

        return self._run("reduce_scatter", wholes, outputs, work)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        source = opts.rootRank if opts is not None else 0

        def work() -> None:
            for tensor in tensors:
                _host(tensor).copy_(self._gathered(tensor)[source])

        return self._run("broadcast", tensors, tensors, work)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> _Done:
        assert not output_sizes and not sizes, "only equal sizes are supported (simulated)"

        def work() -> None:
            parts = self._gathered(given).view(self.ranks, self.ranks, -1)[:, self.rank()]
            _host(output).view(-1).copy_(parts.reshape(-1))

        return self._run("all_to_all", [given], [output], work)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Done:
        done = self._run("send", tensors, [], lambda: None)
        copies = [_host(tensor).clone() for tensor in tensors]  # the sender may change its tensors before the transfer
        return _Sent(done, self.carrier.send(copies, to, tag), copies)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Done:
        done = self._run("recv", [], tensors, lambda: None)
        arriving = [torch.empty_like(_host(tensor)) for tensor in tensors]
        return _Received(done, self.carrier.recv(arriving, source, tag), arriving)

    def barrier(self, opts: Any = None) -> _Done:
        torch.cuda.synchronize()
        self.carrier.barrier().wait()
        return _Done(torch.cuda.current_stream().record_event(), [])

    # their names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _host(tensor: Tensor) -> Tensor:
    return _ops.in_host_memory(tensor.detach()) if tensor.is_cuda else tensor.detach()  # type: ignore[no-any-return]


def _reduction(opts: Any) -> Callable[[Tensor], Tensor]:
    return REDUCTIONS[opts.reduceOp.op if opts is not None else dist.ReduceOp.SUM]


def _make(store: dist.Store, rank: int, size: int, timeout: Any) -> Group:
    return Group(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _make, devices=["cuda"])
