"""A decode step as CUDA graphs, one per number of rows: captured once, then replayed without Python in between.

Only a few numbers of rows have graphs (`bucket`). A step with fewer rows is padded with the scratch slot. Graphs share
one memory pool, because no two run at a time. They are valid for fixed addresses of weights, cache and table.

A graph contains the collectives of tensor parallelism: all ranks of a group capture and replay the same steps, because
they plan from the same tokens.

A forward that reads a number on the host cannot be captured. Before the capture, the step runs once under PyTorch's
check for such reads. If the check fails, all steps run without graphs.

The workspace of cuBLAS is in the memory pool of the graphs. Otherwise they would use the workspace of the stream, which
PyTorch frees with any graph that was captured on the stream (torch 2.12 to 2.14, pytorch/pytorch#193402). Then replays
of the other graphs would write to memory that is not theirs.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from engine.host_memory import upload
from engine.internals import clear_cublas_workspaces
from engine.oom import is_out_of_memory
from engine.parallel import collectives, dist

log = logging.getLogger(__name__)
_warned: set[str] = set()


class GraphedStep:
    """A step for any number of rows, replayed as a CUDA graph on GPUs."""

    def __init__(self, step: Callable[[Tensor], None], counter: Tensor, *, scratch: int, name: str) -> None:
        """`counter` () counts the steps. `scratch` is the slot of rows that pad a step, `name` that of the model."""
        self.step, self.scratch, self.name, self._counter = step, scratch, name, counter
        self.captures = counter.is_cuda
        self._inputs: dict[int, Tensor] = {}  # by number of rows, the argument of the step
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sent: dict[int, int] = {}  # by number of rows, the bytes that a replay sends to other ranks
        if self.captures:
            self._stream, self._pool = _capture_stream(torch.cuda.current_device()), torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def run(self, slots: Sequence[int], firsts: Sequence[int], times: int) -> None:
        """Run the step `times` times for these slots. Return before the device has finished."""
        size = bucket(len(slots))
        if size not in self._inputs:
            self._inputs[size] = upload([[self.scratch] * size, [*range(size)]], self._counter.device)  # only padding
        chosen = self._inputs[size]
        replay = self._replay(size, chosen)
        padding = size - len(slots)
        rows = [[*slots, *[self.scratch] * padding], [*firsts, *range(len(slots), size)]]
        chosen.copy_(upload(rows, chosen.device), non_blocking=True)
        for _ in range(times):
            replay()
        collectives.count_bytes("other", times * self._sent.get(size, 0))

    def release(self) -> None:
        """Free the graphs. The next run captures them again."""
        self._graphs.clear()
        self._inputs.clear()

    def _replay(self, size: int, chosen: Tensor) -> Callable[[], None]:
        """Return a function that runs one step for the rows at this address."""
        if self.captures and size not in self._graphs:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self.captures = self._warm_up(chosen)
                if self.captures:
                    before = collectives.bytes_sent()
                    self._graphs[size] = self._capture(chosen)
                    self._sent[size] = (collectives.bytes_sent() - before).total
                    if self._sent[size]:
                        dist.release_before_stop(self)
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._graphs[size].replay if size in self._graphs else lambda: self.step(chosen)

    def _warm_up(self, chosen: Tensor) -> bool:
        """Run the step twice, to compile kernels and allocate workspaces. Return whether it can be captured."""
        before = self._counter.clone()
        self._counter.fill_(-1)
        self.step(chosen)
        try:
            with _refuse_to_wait():
                self.step(chosen)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            if self.name not in _warned:
                _warned.add(self.name)
                log.warning("%s decodes without CUDA graphs, more slowly: %s", self.name, str(error).partition("\n")[0])
            return False
        finally:
            self._counter.copy_(before)
        return True

    def _capture(self, chosen: Tensor) -> torch.cuda.CUDAGraph:
        """Capture one step. Raises RuntimeError if CUDA refuses it, after which PyTorch's allocator is unusable."""
        torch.cuda.synchronize()
        clear_cublas_workspaces()
        torch.cuda.empty_cache()  # during a capture, the allocator does not return cached memory and raises instead
        graph = torch.cuda.CUDAGraph()
        try:
            # Not "global": threads of offload and checkpoints may allocate memory during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self.step(chosen)
            graph.capture_end()
            clear_cublas_workspaces()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):  # CUDA did not fail: allocator and stream remain usable
                graph.capture_end()
                clear_cublas_workspaces()
            if is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"the decode step of {self.name} could not be captured in a CUDA graph "
                f"({str(error).partition(chr(10))[0]}); generate with stream=true, which uses no graphs"
            ) from error
        return graph


def bucket(rows: int) -> int:
    """Return the least of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ... that is at least `rows`."""
    size = 1
    while size < rows:
        size *= 2
    return size * 3 // 4 if size >= 32 and rows <= size * 3 // 4 else size


@cache
def _capture_stream(_device: int) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a device are captured.

    PyTorch's allocator caches memory for each stream. All captures use this stream, because no two run at a time.
    """
    return torch.cuda.Stream()


@contextmanager
def _refuse_to_wait() -> Iterator[None]:
    """Raise RuntimeError inside the context if the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # PyTorch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
