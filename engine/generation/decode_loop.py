"""The decode loop: a model with its key-value cache and its decode steps, which are reused between calls.

Sequences of any lengths share forwards, and a new sequence starts when another one ends (`decode_session.py`). A
forward carries its tokens in one row (1, N), whichever sequence they belong to, so nothing is padded.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.generation.attention import DecodeRows, StepTokens
from engine.generation.decode_session import DecodeSession
from engine.generation.decode_step import DecodeStep, Sampler, SlotModel
from engine.generation.kv_cache import CacheDemand, CacheSize, KVCache, default_cache_bytes
from engine.generation.model_support import (
    UnsupportedModel,
    check_model,
    counts_from_zero,
    fixed_prompts,
    has_window,
    logits_differ,
    plain_logits,
)
from engine.generation.sampling import SampledToken, Sampling
from engine.generation.scheduler import Chunk, Scheduler, queue_order
from engine.host_memory import upload
from engine.oom import is_out_of_memory

if TYPE_CHECKING:
    from engine.generation.cuda_graph import GraphedStep

log = logging.getLogger(__name__)
# Prompt tokens in one forward, at most. This bounds the activations, which should stay in the caches of a CPU.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
WINDOW = 8  # replays of a CUDA graph between two reads by the host
MAX_SAMPLERS = 4  # sampling settings whose tensors and graphs exist at a time


class DecodeLoop:
    """A model with its key-value cache and its decode steps, which are reused between calls.

    The constructor tries the model with a few tokens. Raises UnsupportedModel if the cache does not support the model.
    `cache_bytes` bounds keys and values (default: half of the free memory). `use_graphs` False runs every step through
    the modules.
    """

    mode = "slots"

    def __init__(
        self, module: nn.Module, device: torch.device, cache_bytes: int | None = None, *, use_graphs: bool = True
    ) -> None:
        self.device, self.cache_bytes = device, cache_bytes
        self.use_graphs = use_graphs and device.type == "cuda"
        check_model(module)
        self.model = SlotModel(module, device)
        self.cache: KVCache | None = None
        self._step: DecodeStep | None = None
        self._samplers: dict[Sampling, tuple[Sampler, GraphedStep | None]] = {}
        self._addresses: list[int] = []
        self._warned = False
        self.token_bytes = self._try()

    def refresh(self) -> None:
        """Recompute the copies that were derived from the weights."""
        self.model.packs.refresh()

    def release(self) -> None:
        """Free the cache, the copies of weights and the graphs."""
        self._samplers.clear()
        self.cache = self._step = None
        self.model.packs.release()

    def memory(self) -> tuple[list[Tensor], list[Tensor], int]:
        """Return no weights, keys and values in the cache, and the bytes of prepacked weights."""
        return [], [] if self.cache is None else self.cache.tensors, self.model.packs.bytes

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[SampledToken]]:
        """Answer the prompts; yield the tokens of each step. `ends` returns whether a token ends a request's answer."""
        longest, different = max(len(prompt) for prompt in prompts), len({tuple(prompt) for prompt in prompts})
        batch_size = min(batch_size, len(prompts))
        session = self.open(CacheDemand(longest, sampling.max_new_tokens, different, len(prompts), batch_size))
        for request in queue_order(prompts):
            session.add(request, prompts[request], sampling, sample_seeds[request], ends=ends)
        while session.busy:
            yield from session.advance()

    def open(self, demand: CacheDemand, sharing: int = 1) -> DecodeSession:
        """Return an empty session; with little memory, fewer sequences decode at a time than demanded.

        It uses the current decode step, or a new one if cache or weights have new addresses. `sharing` caches divide
        the free memory.
        """
        cache, module = self._cache_for(demand, sharing), self.model.module
        addresses = [tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]]
        if self._step is None or addresses != self._addresses:
            self._samplers.clear()
            self._step, self._addresses = DecodeStep(self.model, cache, WINDOW + 1), addresses
        sequences, prefill_tokens = min(demand.batch_size, cache.size.sequences), PREFILL_TOKENS[self.device.type]
        scheduler = Scheduler(sequences, cache.size.prompt_slots, prefill_tokens)
        return DecodeSession(self._step, self._sampler_for, scheduler, WINDOW if self.use_graphs else 0)

    def _cache_for(self, demand: CacheDemand, sharing: int) -> KVCache:
        """Return the current cache if it is large enough, else a new cache within the bound."""
        reusable = 0 if self.cache is None or self.cache_bytes is not None else self.cache.size.tokens // 2
        bound = default_cache_bytes(self.device) // sharing if self.cache_bytes is None else self.cache_bytes
        tokens = bound // self.token_bytes + reusable
        size = demand.size_within(tokens)
        if self.cache is None or not demand.fits(self.cache.size, size.sequences):
            self.cache = self._step = None  # free the old memory first
            self._samplers.clear()
            self.cache = KVCache(size, self.device)
            if size.tokens > tokens and not self._warned:
                self._warned = True
                log.warning(
                    "the key-value cache may take %d bytes (cache_bytes), and one sequence takes %d bytes: one "
                    "sequence decodes at a time, and the bound is exceeded",
                    bound,
                    size.tokens * self.token_bytes,
                )
        return self.cache

    def _sampler_for(self, step: DecodeStep, sampling: Sampling) -> tuple[Sampler, "GraphedStep | None"]:
        """Return the sampler of these settings, and the graphs of the decode step with it, None without graphs."""
        settings = replace(sampling, seed=0, stop=(), max_new_tokens=max(1, sampling.min_new_tokens))
        if settings in self._samplers:
            entry = self._samplers.pop(settings)
        else:
            vocabulary: int = step.model.module.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
            sampler, graphs = Sampler(settings, step.state, vocabulary), None
            if self.use_graphs and settings.top_logprobs is None:  # the host reads the likeliest tokens
                from engine.generation.cuda_graph import GraphedStep

                scratch, name = step.cache.size.sequences, type(self.model.module).__name__
                run = partial(step.run, chunks=(), samplers=[sampler])
                graphs = GraphedStep(run, step.state.step, scratch=scratch, name=name)
            entry = sampler, graphs
        self._samplers[settings] = entry
        while len(self._samplers) > MAX_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
        return entry

    @torch.inference_mode()
    def _try(self) -> int:
        """Run a few tokens as a chunk, then each of them as a row; return the bytes of a cached token.

        Raises UnsupportedModel if the cache does not support the model.
        """
        module, device = self.model.module, self.device
        prompt = fixed_prompts(module)[0]
        count = len(prompt)
        cache = KVCache(CacheSize(1, count, count + 1, 1), device)
        token_ids, at, zeros = upload([prompt, [*range(count)], [0] * count], device)
        rows = DecodeRows(at, token_ids, at, zeros, zeros, at + 1, zeros, at, zeros)
        no_rows = DecodeRows(*(each[:0] for each in rows))
        try:
            if count > 1:
                self.model(token_ids[:-1], at[:-1], StepTokens(cache, no_rows, [Chunk(0, prompt[:-1], 0)]))
            logits = self.model(token_ids, at, StepTokens(cache, rows))
            plain = plain_logits(module, device, prompt)
            are_from_zero = counts_from_zero(module, device)
        except Exception as error:  # a forward that needs other arguments may raise any exception
            if is_out_of_memory(error):
                raise
            raise UnsupportedModel(str(error).partition("\n")[0] or type(error).__name__) from error
        layers = module.config.get_text_config(decoder=True).num_hidden_layers  # type: ignore[union-attr, operator]
        if len(cache.layers) != layers:
            raise UnsupportedModel(f"only {len(cache.layers)} of its {layers} layers call the registered attention")
        if has_window(module) and all(layer.window is None for layer in cache.attention.values()):
            raise UnsupportedModel("its layers do not pass their sliding window to the registered attention")
        if not are_from_zero:
            raise UnsupportedModel("its own positions do not count from 0")
        if logits_differ(module, logits, plain):
            raise UnsupportedModel("its logits differ from those of its plain forward")
        return cache.token_bytes
