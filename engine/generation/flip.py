"""The flip: turn a training module into a generator and back.

On entry the flip syncs the weights into the inference model and prepares the generator. On exit it retains or frees
their memory. The first flips, and every `parity_check_every`-th flip, compare the generator with the module's own
forward.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from engine.generation.generator import Generator
from engine.generation.inference_model import InferenceModel
from engine.generation.kv_cache import default_cache_bytes
from engine.generation.parity_check import CheckedAnswer, check_generator
from engine.host_memory import pinned
from engine.parallel import dist, dtensors

FIRST_CHECKS = 4  # flips that are always checked: of PPO, two evaluations and the rollouts before and after an update


class Flip:
    """The generation side of one training module.

    Set `stream`, `tensor_parallel`, `cache_bytes` and `uses_vllm` before the first flip. `seconds` is the time of the
    last flip in both directions, `bytes` the number of bytes that its weight sync copied, and `checked` the answers of
    its parity check (empty if the flip was not checked).
    """

    def __init__(self, make_model: Callable[..., InferenceModel]) -> None:
        """The first flip calls `make_model(tensor_parallel=..., stream=...)`."""
        self.stream = False  # gather the parameters of a block only while it runs
        self.tensor_parallel = 1  # neighbouring ranks that share a generator
        self.cache_bytes: int | None = None  # bound of the key-value cache
        self.uses_vllm = False
        self.parity_check_every = 50  # flips; 0 switches the check off
        self.checked: list[CheckedAnswer] = []
        self.seconds, self.bytes = 0.0, 0
        self._make_model = make_model
        self._model: InferenceModel | None = None
        self._generator: Generator | None = None
        self._count = 0

    @contextmanager
    def generating(self, *, keep: bool, park: torch.optim.Optimizer | None = None) -> Iterator[Generator]:
        """Provide a generator with the current weights. Collective.

        `keep` retains the memory of weights and cache for the next flip. Inside the context the states of the optimizer
        `park` are in host memory.
        """
        with ExitStack() as stack:
            began = time.perf_counter()
            if park is not None:
                stack.enter_context(states_on_host(park))
            generator = self._sync()
            self.seconds = time.perf_counter() - began
            try:
                self.checked = self._check(generator)
                if self.uses_vllm and self._model is not None:
                    self._model.release()  # vLLM has its own copy of the weights
                yield generator
            finally:
                if self._model is not None and self._model.stream is not None:
                    self._model.stream.finish()
                began = time.perf_counter()
                if not keep:
                    self.release()
                stack.close()
                self.seconds += time.perf_counter() - began

    def assign(self, prompt_lengths: Sequence[int]) -> list[int]:
        """Return the indices of the prompts that this rank answers. Tensor-parallel ranks answer the same prompts."""
        groups = dist.world().size // self.tensor_parallel
        return deal(prompt_lengths, groups, dist.world().rank // self.tensor_parallel)

    def release(self) -> None:
        """Free the copied weights, all data derived from weights, and the cache."""
        if self._generator is not None:
            self._generator.release()
        if self._model is not None:
            self._model.release()

    def memory(self) -> tuple[list[Tensor], list[Tensor], int]:
        """Return the inference model's weights (with shared ones), the cache, and the bytes of prepacked weights."""
        copied = [] if self._model is None else self._model.tensors()
        weights, cache, packs = ([], [], 0) if self._generator is None else self._generator.backend.memory()
        return [*copied, *weights], cache, packs

    def _sync(self) -> Generator:
        """Sync the live weights into the generator. The first call creates the generator."""
        if self._model is None or self._generator is None:
            self._model, self._generator = self._make()
        self._model.sync()
        if self.tensor_parallel > 1 and self._generator.cache_bytes is None:
            # Ranks that share a generator run equally many sequences, and the weights are in memory now.
            self._generator.cache_bytes = -int(dist.max_over_ranks(-float(default_cache_bytes(self._model.device))))
        if self.tensor_parallel > 1 and self._generator.fallback is not None:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} for generation needs a model that the slot cache supports, "
                f"and {self._generator.fallback}; use 1"
            )
        self._generator.refresh()
        self._count += 1
        self.bytes = self._model.bytes
        return self._generator

    def _make(self) -> tuple[InferenceModel, Generator]:
        ranks = self.tensor_parallel
        if ranks > 1 and self.stream:  # two threads would call collectives in any order
            raise ValueError(
                f"stream=True cannot be combined with tensor_parallel={ranks} for generation: choose one of them"
            )
        model = self._make_model(tensor_parallel=ranks, stream=self.stream)
        options = {"use_graphs": not self.stream, "uses_vllm": self.uses_vllm}
        return model, Generator(model.module, model.device, self.cache_bytes, **options)

    def _check(self, generator: Generator) -> list[CheckedAnswer]:
        """Run the parity check if it is due. Raises ValueError on every rank if it fails on one."""
        every = self.parity_check_every
        if every == 0 or (self._count > FIRST_CHECKS and self._count % every):
            return []
        checked: list[CheckedAnswer] = []
        problem: ValueError | None = None
        try:
            checked = check_generator(generator)
        except ValueError as error:
            problem = error
        if dist.max_over_ranks(float(problem is not None)) > 0:
            raise problem or ValueError("the parity check failed on another rank; its message gives the reason")
        return checked


def deal(prompt_lengths: Sequence[int], groups: int, group: int) -> list[int]:
    """Return the indices of the prompts that a group answers, in rising order.

    The prompts are dealt out from the longest to the shortest, forwards and backwards in turn: 0, 1, 1, 0, 0, 1, ...
    """
    longest_first = sorted(range(len(prompt_lengths)), key=lambda i: (-prompt_lengths[i], i))
    return sorted(longest_first[group :: 2 * groups] + longest_first[2 * groups - 1 - group :: 2 * groups])


@contextmanager
def states_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Move an optimizer's states from a GPU to host memory inside the context.

    Only the storages are freed: the tensors stay the same objects, so the optimizer does not notice.
    """
    values = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    storages = [local.untyped_storage() for value in values if (local := dtensors.local(value)).is_cuda]
    if not storages:
        yield
        return
    sizes = [storage.nbytes() for storage in storages]
    copies = _pinned_memory(sum(sizes)).split(sizes)
    for storage, copy in zip(storages, copies, strict=True):
        copy.copy_(_bytes(storage), non_blocking=True)
    torch.cuda.synchronize()
    for storage in storages:
        storage.resize_(0)
    try:
        yield
    finally:
        for storage, copy in zip(storages, copies, strict=True):
            storage.resize_(len(copy))
            _bytes(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()


@lru_cache(maxsize=1)
def _pinned_memory(size: int) -> Tensor:
    """Return pinned memory, the same at each flip, because to pin it takes longer than to fill it."""
    return pinned(size, torch.uint8)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
