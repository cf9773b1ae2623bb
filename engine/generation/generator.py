"""The generator: answers sampled from a causal language model.

Models that support attention over the key-value cache run in the decode loop (`decode_loop.py`): no padding, and a free
slot is used in the next step. Other models use transformers' `generate` (`transformers_fallback.py`), and a warning is
logged. In both cases an answer depends only on its prompt, the sampling settings and its sample seed. It does not
depend on the order of the prompts, the batch size or the world size.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from engine.generation.decode_loop import DecodeLoop
from engine.generation.decode_session import DecodeSession
from engine.generation.kv_cache import CacheDemand
from engine.generation.model_support import UnsupportedModel, frequency_change, max_positions
from engine.generation.prepacked_linears import move_to_huge_pages
from engine.generation.sampling import Ending, SampledToken, Sampling, check_logprobs
from engine.parallel import dist

if TYPE_CHECKING:
    from engine.generation.transformers_fallback import TransformersFallback
    from engine.generation.vllm_backend import VllmEngine

# `run` answers prompts as `Generator.run` does. `refresh` follows a change of the weights, and `release` frees memory.
# `memory` returns weights besides those of the module, the cache, and the bytes of prepacked weights.
Backend: TypeAlias = "DecodeLoop | TransformersFallback | VllmEngine"

log = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True)
class Generation:
    """An answer. If `finished`, `token_ids` ends with the token that ended it.

    `logprobs` has one number per token, under the distribution that the token was sampled from (`sampling.sample`).
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool


class Generator:
    """Generates with a plain causal language model of transformers: no hooks, no dropout, full weights on `device`.

    `cache_bytes` bounds the key-value cache (default: half of the free memory); with little memory fewer sequences
    decode at a time. `use_graphs` False runs every step through the modules, whose hooks a CUDA graph would miss. Call
    `refresh` after a change of the weights. Raises ValueError if the GPU is not the current one.

    On a CPU, the parameters in bf16 move to huge pages, which a step reads faster. They remain the same objects with
    the same values.

    With `uses_vllm` vLLM generates, and the first use is a collective. `cache_bytes` is the size of its paged cache. By
    default vLLM takes half of the free memory of a GPU for weights and cache. On a CPU, the cache takes half of the
    free memory and at most 4 GiB.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str,
        cache_bytes: int | None = None,
        *,
        use_graphs: bool = True,
        uses_vllm: bool = False,
    ) -> None:
        self.module, self.device, self.cache_bytes = module, torch.device(device), cache_bytes
        if self.device.type == "cuda" and self.device.index not in (None, torch.cuda.current_device()):
            # Kernels and graphs run on the current GPU, wherever the tensors are.
            raise ValueError(f"{device} is not the current GPU: call torch.cuda.set_device({self.device.index}) first")
        move_to_huge_pages(module)
        self._positions = max_positions(module)
        self._use_graphs, self._uses_vllm = use_graphs, uses_vllm
        # Why the decode loop does not generate.
        self._reason = "vLLM answers complete batches" if uses_vllm else None
        self._backend: Backend | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int = 64,
        samples: int = 1,
        text: Callable[[list[int]], str] | None = None,
    ) -> list[Generation]:
        """Return `samples` answers per prompt (token ids), in the order of the prompts.

        sample_seeds: one integer per answer; the same sample seed, `sampling.seed` and prompt give the same answer.
        batch_size: how many answers are decoded at a time. text: turns token ids into text, for stop strings.
        Raises ValueError if a prompt is empty or too long for the model, and FloatingPointError if logits are NaN.
        """
        prompts = [prompt for prompt in prompts for _ in range(samples)]
        if len(sample_seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} answers need as many sample_seeds, not {len(sample_seeds)}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        token_ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        finished = [False for _ in prompts]
        for sampled in self.run(prompts, sampling, sample_seeds, batch_size, Ending(sampling, text)):
            for token in sampled:
                token_ids[token.request].append(token.token)
                logprobs[token.request].append(token.logprob)
                finished[token.request] = token.finish == "stop"
        return [Generation(*answer) for answer in zip(token_ids, logprobs, finished, strict=True)]

    def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        sample_seed: int = 0,
        text: Callable[[list[int]], str] | None = None,
    ) -> Iterator[int]:
        """Yield the tokens of one answer as they are sampled, the end token included."""
        for sampled in self.run([prompt], sampling, [sample_seed], 1, Ending(sampling, text)):
            yield sampled[0].token

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[SampledToken]]:
        """Yield the tokens of each step. The request of a token is the index of its prompt.

        ends: called with the index and each token; returns whether the answer ends with this token.
        """
        if not prompts:
            return
        self._check_lengths([len(prompt) for prompt in prompts], sampling.max_new_tokens)
        for sampled in self.backend.run(prompts, sampling, sample_seeds, batch_size, ends):
            check_logprobs(sampled)
            dist.note_work()
            yield sampled

    def session(self, slots: int, prompt_tokens: int, new_tokens: int, *, sharing: int = 1) -> DecodeSession:
        """Return an empty batch to which requests can be added while others decode.

        At most `slots` sequences decode at a time, or fewer with little memory. Prompts have at most `prompt_tokens`
        tokens, answers at most `new_tokens`. `sharing` generators divide the free memory of the device: their caches
        are allocated later, when tokens arrive. Raises ValueError if the decode loop does not support the model.
        """
        backend = self.backend
        if not isinstance(backend, DecodeLoop):
            name = type(self.module).__name__
            raise ValueError(f"{name} cannot decode requests that arrive one by one: {self._reason}")
        return backend.open(CacheDemand(prompt_tokens, new_tokens, slots, slots, slots), sharing)

    def refresh(self) -> None:
        """Use the current weights of `module`."""
        if self._backend is not None:
            self._backend.refresh()
        else:
            self._backend = self._create()  # from the current weights

    def release(self) -> None:
        """Free the cache and all data derived from the weights. The next call creates them again."""
        if self._backend is not None:
            self._backend.release()

    @property
    def fallback(self) -> str | None:
        """The reason why the decode loop does not generate; None if it does."""
        return None if isinstance(self.backend, DecodeLoop) else self._reason

    @property
    def mode(self) -> str:
        """How it generates: "slots" (decode loop), "vllm", or a batching method of transformers' `generate`."""
        return self.backend.mode

    @property
    def backend(self) -> Backend:
        """The decode loop or its replacement. The first use tests the model.

        Raises ValueError if neither reproduces the logits of the plain forward.
        """
        if self._backend is None:
            self._backend = self._create()
        return self._backend

    def _create(self) -> Backend:
        if self._uses_vllm:
            from engine.generation.vllm_backend import create_engine

            return create_engine(self.module, self.device, self.cache_bytes)
        try:
            return DecodeLoop(self.module, self.device, self.cache_bytes, use_graphs=self._use_graphs)
        except UnsupportedModel as reason:
            self._reason = str(reason)
        from engine.generation.transformers_fallback import TransformersFallback

        backend = TransformersFallback(self.module, self.device)
        name = type(self.module).__name__
        if name not in _warned and dist.is_rank_zero():
            _warned.add(name)
            description = backend.batching.description
            log.warning("%s generates with transformers' generate %s: %s", name, description, self._reason)
        return backend

    def _check_lengths(self, lengths: Sequence[int], new_tokens: int) -> None:
        if min(lengths) < 1:
            raise ValueError("a prompt must have at least one token")
        limit = self._positions
        if limit is not None and max(lengths) + new_tokens > limit:
            same = "" if frequency_change(self.module) is None else " with the same rotary frequencies (longrope)"
            raise ValueError(
                f"a prompt of {max(lengths)} tokens and max_new_tokens={new_tokens} do not fit into the {limit} "
                f"positions of the model{same}; use a smaller max_new_tokens or shorter prompts"
            )
