"""A static step as CUDA graphs, one a number of rows: captured once, then replayed without Python in between.

The numbers of rows are few (`bucket`); a step with fewer is filled up with the scratch slot. Graphs share one memory
pool, as no two run at a time, and hold no tensor that outlives a replay: what a step keeps lies outside (`DecodeState`,
the cache). They are bound to the addresses of weights, cache and state.

A model whose forward asks the device for a number can't be captured. That is found out by running a step under
PyTorch's own check for such questions, before anything is captured; the step is then called as it is.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor

from engine.generation.buckets import bucket
from engine.generation.on_device.static_step import BEFORE, StaticStep
from engine.oom import is_out_of_memory
from engine.uploads import upload

log = logging.getLogger(__name__)
_told: set[str] = set()
_given_up: list[torch.cuda.CUDAGraph] = []  # PyTorch may ask each which stream it captures: they have to live on


class StuckCapture(Exception):
    """PyTorch believes that a capture runs which was given up."""


class Replays:
    """A static step for any number of rows. `captures` False calls it as it is."""

    def __init__(self, step: StaticStep, *, captures: bool) -> None:
        self.step, self.captures = step, captures
        self._inputs: dict[int, Tensor] = {}  # what a step is called with, by bucket
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if captures:
            self._stream, self._pool = _stream_of(torch.cuda.current_device()), torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def run(self, slots: Sequence[int], firsts: Sequence[int], times: int) -> None:
        """Run the step `times` times for these slots; returns before the device is done."""
        size = bucket(len(slots))
        device, scratch = self.step.state.rows.device, self.step.state.scratch
        if size not in self._inputs:
            self._inputs[size] = torch.empty(2, size, dtype=torch.int64, device=device)
            self._fill_up(self._inputs[size])
        chosen = self._inputs[size]
        replay = self._replay(size, chosen)
        rows = [[*slots, *[scratch] * (size - len(slots))], [*firsts, *range(len(slots), size)]]
        chosen.copy_(upload(rows, device), non_blocking=True)
        for _ in range(times):
            replay()

    def _fill_up(self, chosen: Tensor) -> None:
        """All rows are scratch, and nobody's neighbours."""
        chosen[0].fill_(self.step.state.scratch)
        torch.arange(chosen.shape[1], out=chosen[1])

    def _replay(self, size: int, chosen: Tensor) -> Callable[[], None]:
        """One step for what lies at this address, (2, size)."""
        if self.captures and size not in self._graphs:
            try:
                self._graphs[size] = self._capture(chosen)
            except RuntimeError as problem:
                if is_out_of_memory(problem):  # says nothing about the model
                    raise
                self.captures = False
                _say_once(type(self.step.forwards.module).__name__, problem)
        return self._graphs[size].replay if size in self._graphs else lambda: self.step(chosen)

    def _capture(self, chosen: Tensor) -> torch.cuda.CUDAGraph:
        """Needs a GPU. All slots are the scratch one while it warms up. Raises RuntimeError, and StuckCapture."""
        self._fill_up(chosen)
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                self._warm_up(chosen)
                return self._record(chosen)
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _warm_up(self, chosen: Tensor) -> None:
        """Run the step twice: kernels compile and workspaces are made, which may wait; then nothing may."""
        place = self.step.state.said.place
        before = place.clone()
        try:
            place.fill_(BEFORE)
            self.step(chosen)
            with _refuse_to_wait():
                self.step(chosen)
        finally:
            place.copy_(before)

    def _record(self, chosen: Tensor) -> torch.cuda.CUDAGraph:
        """The step as a graph. `torch.cuda.graph` would stay on its stream where ending the capture fails."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            self._begin(graph)
            self.step(chosen)
        except BaseException as problem:
            self._end(graph, problem)
            raise
        self._end(graph)
        return graph

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        # Threads of offload and checkpoints may go on allocating meanwhile: hence not "global".
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self, graph: torch.cuda.CUDAGraph, problem: BaseException | None = None) -> None:
        """End a capture, in which there was a `problem`. Raises RuntimeError where there was none and it can't end."""
        try:
            graph.capture_end()
        except RuntimeError as refused:
            self._mend(graph, problem or refused)
            if problem is None:
                raise

    def _mend(self, graph: torch.cuda.CUDAGraph, problem: BaseException) -> None:
        """After a capture that CUDA gave up PyTorch goes on as if it ran: its allocator puts off what it should free
        and gives nothing back, its generator refuses to draw. Tell the one, and let the other see a capture end well;
        that this begins in the same pool shows that the first is told. Raises StuckCapture where it can't be done.
        """
        device, ours = torch.cuda.current_device(), False
        try:
            with suppress(RuntimeError):  # it knows, where all that failed is to make the graph one that can run
                torch._C._cuda_endAllocateToPool(device, self._pool)
                ours = True
                _given_up.append(graph)
            trial = torch.cuda.CUDAGraph()
            self._begin(trial)
            self.step.state.said.place.add_(0)
            trial.capture_end()
            if ours:
                torch._C._cuda_releasePool(device, self._pool)
        except (RuntimeError, AttributeError) as left:
            raise StuckCapture(
                f"a CUDA graph could not be captured ({_first_line(problem)}), and PyTorch can't be brought back to "
                f"where it was ({_first_line(left)}): start again, the run goes on from its last checkpoint; if this "
                "comes again, rollout.stream=true generates without graphs"
            ) from problem


@cache
def _stream_of(_device: int) -> torch.cuda.Stream:
    """What all graphs of a device are captured on. cuBLAS takes a workspace for each stream that it sees, 32 MiB on an
    H100, and keeps it: this one is there before the first capture and serves all, as no two run at a time.
    """
    return torch.cuda.Stream()


@contextmanager
def _refuse_to_wait() -> Iterator[None]:
    """Within the block what makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _say_once(name: str, problem: Exception) -> None:
    if name not in _told:
        _told.add(name)
        log.warning("%s decodes without CUDA graphs, more slowly: %s", name, _first_line(problem))


def _first_line(problem: BaseException) -> str:
    return str(problem).partition("\n")[0]
