"""Turning a training module into a generator and back: the twin, its rollout engine, the check that it is the model.

Entering gathers the parameters into the twin, and packs its matrices where that pays; leaving keeps or frees all of it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from engine.generation.balance import shares
from engine.generation.rollouts import Rollouts
from engine.generation.selfcheck import Checked, selfcheck
from engine.generation.slot_decoder import free_bytes
from engine.generation.twin.hybrid import Twin
from engine.generation.twin.parking import parked
from engine.generation.twin.pooling import alone, pool_of
from engine.parallel import dist

SELFCHECK_FIRST = 2  # flips that are always checked


class Flip:
    """The generation side of one training module.

    `seconds` is how long the last flip took, in and (once it is left) out, packing included; `bytes` are those written
    into the twin's buffers. `checked` is what the last flip's self-check said; empty where there was none.
    """

    def __init__(
        self, blueprint: nn.Module, source: nn.Module, dtype: torch.dtype, plan: Mapping[str, str] | None = None
    ) -> None:
        """See `Twin`, which takes the blueprint over when it is first needed."""
        self._plan = plan
        self.stream = False  # whether blocks are gathered only while they run; to be set before the first flip
        self.cache_bytes: int | None = None  # see `Rollouts`; to be set before the first flip
        self.tensor_parallel = 1  # neighbouring ranks that generate together; to be set before the first flip
        self._blueprint, self._source, self._dtype = blueprint, source, dtype
        self._twin: Twin | None = None
        self._rollouts: Rollouts | None = None
        self._pool = alone()
        self._count = 0
        self.selfcheck_every = 50  # flips, beside the first two; 0 never checks
        self.checked: list[Checked] = []
        self.seconds, self.bytes = 0.0, 0

    @contextmanager
    def entered(self, *, keep: bool, park: torch.optim.Optimizer | None = None) -> Iterator[Rollouts]:
        """Within the block there is a generator with the live weights as they are now.

        `keep` holds buffers, packs and cache for next time. The states of the optimizer `park` are on the host
        meanwhile.
        """
        with ExitStack() as stack:
            began = time.perf_counter()
            if park is not None:
                stack.enter_context(parked(park))
            rollouts = self._enter()
            self.seconds = time.perf_counter() - began
            try:
                with self._pool.at_work():
                    self.checked = self._selfcheck(rollouts)
                    yield rollouts
            finally:
                self._finish()
                began = time.perf_counter()
                if not keep:
                    self.release()
                stack.close()
                self.seconds += time.perf_counter() - began

    @property
    def group(self) -> int:
        """Which of the `groups` this rank belongs to; ranks of one answer the same prompts, groups different ones."""
        return dist.world().rank // self.tensor_parallel

    @property
    def groups(self) -> int:
        return dist.world().size // self.tensor_parallel

    def share_of(self, prompt_lengths: Sequence[int], expected: float) -> list[int]:
        """The places of the prompts that this rank is to answer; `expected` tokens an answer. To be asked in a flip."""
        if self._pool.ranks > 1:
            return list(range(len(prompt_lengths))) if self._pool.leads else []
        return shares(prompt_lengths, self.groups, expected)[self.group]

    def release(self) -> None:
        """Free the twin's parameters, what was derived from them, and the cache."""
        if self._rollouts is not None:
            self._rollouts.release()
        if self._twin is not None:
            self._twin.release()

    def held(self) -> tuple[list[Tensor], list[Tensor], int]:
        """The twin's weights, live ones that it shares among them; keys and values of the cache; bytes of packs."""
        weights = [] if self._twin is None else self._twin.held()
        cache, packs = ([], 0) if self._rollouts is None else self._rollouts.held()
        return weights, cache, packs

    def _finish(self) -> None:
        if self._twin is not None and self._twin.stream is not None:
            self._twin.stream.finish()

    def _enter(self) -> Rollouts:
        if self._twin is None or self._rollouts is None:
            self._twin, self._rollouts = self._make()
        self._twin.refresh()
        if self.tensor_parallel > 1 and self._rollouts.fallback is not None:
            raise ValueError(f"rollout.tensor_parallel needs the slot cache, and {self._rollouts.fallback}; use 1")
        if self._pool.leads:
            self._rollouts.refresh(self._twin.changed)
        else:
            self._rollouts.release()  # should it be asked nevertheless, it packs what is there then
        self._count += 1
        self.bytes = self._twin.bytes
        return self._rollouts

    def _make(self) -> tuple[Twin, Rollouts]:
        device, ranks = dist.world().device, self.tensor_parallel
        if ranks > 1 and self.stream:  # the thread that gathers and the forward would call collectives in no order
            raise ValueError("blocks that are streamed can't be split over ranks: stream=False, or tensor_parallel=1")
        twin = Twin(
            self._blueprint,
            self._source,
            self._dtype,
            device,
            tensor_parallel=ranks,
            plan=self._plan,
            stream=self.stream,
        )
        by_itself = not self.stream and ranks == 1
        if by_itself:
            self._pool = pool_of(twin.module)
        bound = _agreed_bytes(device) if ranks > 1 and self.cache_bytes is None else self.cache_bytes
        return twin, Rollouts(twin.module, device, bound, replay=by_itself, ranks=self._pool.ranks)

    def _selfcheck(self, rollouts: Rollouts) -> list[Checked]:
        """On the first flips and now and then: does the generator say what its module says? Alike on every rank."""
        every = self.selfcheck_every
        if every == 0 or (self._count > SELFCHECK_FIRST and self._count % every):
            return []
        checked: list[Checked] = []
        problem: ValueError | None = None
        try:
            checked = selfcheck(rollouts) if self._pool.leads else []
        except ValueError as error:
            problem = error
        if dist.max_over_ranks(float(problem is not None)) > 0:
            raise problem or ValueError("another rank's generator is not its model; its message says more")
        return checked if self._pool.ranks == 1 else dist.broadcast_object(checked)


def _agreed_bytes(device: torch.device) -> int:
    """Memory for the cache that every rank has: those that generate together must run as many sequences."""
    sharers = dist.world().size if device.type == "cpu" else 1
    return -int(dist.max_over_ranks(-float(free_bytes(device) // (2 * sharers))))
