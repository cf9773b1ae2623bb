"""The decode loop: a model with its key-value cache and its decode steps, which are reused between calls.

Sequences of any lengths share forwards, and a new sequence starts when another one ends (`decode_session.py`). A
forward carries its tokens in one row (1, N), whichever sequence they belong to, so nothing is padded.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from engine.generation.attention import DecodeRows, StepTokens
from engine.generation.cuda_graph import GraphedStep
from engine.generation.decode_session import DecodeSession
from engine.generation.decode_step import DecodeState, DecodeStep, SlotModel
from engine.generation.kv_cache import CacheDemand, CacheSize, KVCache, free_bytes
from engine.generation.model_support import (
    UnsupportedModel,
    check_model,
    counts_from_zero,
    fixed_prompts,
    has_window,
    logits_differ,
    plain_logits,
)
from engine.generation.sampling import Sampled, Sampling
from engine.generation.scheduler import Chunk, Scheduler
from engine.host_memory import upload
from engine.oom import is_out_of_memory
from engine.parallel import dist

log = logging.getLogger(__name__)
# Prompt tokens in one forward, at most. This bounds the activations, which should stay in the caches of a CPU.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
WINDOW = 8  # replays of a CUDA graph between two reads by the host
MAX_STEPS = 4  # sampling settings whose steps and graphs exist at a time


class DecodeLoop:
    """A model with its key-value cache and its decode steps, which are reused between calls.

    The constructor tries the model with a few tokens. Raises UnsupportedModel if the cache does not support the model.
    `cache_bytes` bounds keys and values (default: half of the free memory). `use_graphs` False runs every step through
    the modules.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        cache_bytes: int | None = None,
        *,
        use_graphs: bool = True,
    ) -> None:
        self.device, self.cache_bytes = device, cache_bytes
        self.use_graphs = use_graphs and device.type == "cuda"
        self.model = SlotModel(module, device, computes_chosen_logits=check_model(module))
        self.cache: KVCache | None = None
        self._state: DecodeState | None = None
        self._steps: dict[Sampling, tuple[DecodeStep, GraphedStep | None]] = {}
        self._addresses: list[int] = []
        self._warned = False
        self.token_bytes = self._try()

    def release(self) -> None:
        """Free the cache, the copies of weights and the graphs."""
        self._steps.clear()
        self.cache = self._state = None
        self.model.packs.release()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[Sampled]]:
        """Answer the prompts; yield the tokens of each step. `ends` returns whether a token ends a request's answer."""
        batch_size = min(batch_size, len(prompts))
        longest, different = max(len(prompt) for prompt in prompts), len({tuple(prompt) for prompt in prompts})
        cache = self._cache_for(CacheDemand(longest, sampling.max_new_tokens, different, len(prompts), batch_size))
        scheduler = Scheduler(
            prompts, min(batch_size, cache.size.sequences), cache.size.prompt_slots, PREFILL_TOKENS[self.device.type]
        )
        session = self._open(cache, scheduler)
        session.register(range(len(prompts)), sampling, sample_seeds, ends)
        while session.busy:
            yield from session.advance()

    def session(self, slots: int, prompt_tokens: int, new_tokens: int) -> DecodeSession:
        """Return an empty session with at most `slots` sequences at a time; with little memory there are fewer.

        Prompts have at most `prompt_tokens` tokens, and answers at most `new_tokens`.
        """
        cache = self._cache_for(CacheDemand(prompt_tokens, new_tokens, slots, slots, slots))
        sequences = min(slots, cache.size.sequences)
        scheduler = Scheduler([], sequences, cache.size.prompt_slots, PREFILL_TOKENS[self.device.type])
        return self._open(cache, scheduler)

    def _open(self, cache: KVCache, scheduler: Scheduler) -> DecodeSession:
        return DecodeSession(partial(self._step_for, cache), cache, scheduler, WINDOW if self.use_graphs else 0)

    def _cache_for(self, demand: CacheDemand) -> KVCache:
        """Return the current cache if it is large enough, else a new cache within the bound."""
        reusable = 0 if self.cache is None or self.cache_bytes is not None else self.cache.size.tokens // 2
        tokens = self._bound() // self.token_bytes + reusable
        size = demand.size_within(tokens)
        if self.cache is None or not demand.fits(self.cache.size, size.sequences):
            self.cache = self._state = None  # free the old memory first
            self._steps.clear()
            self.cache = KVCache(size, self.device)
            if size.tokens > tokens and not self._warned:
                self._warned = True
                log.warning(
                    "the key-value cache may take %d bytes (cache_bytes), and one sequence takes %d bytes: one "
                    "sequence decodes at a time, and the bound is exceeded",
                    self._bound(),
                    size.tokens * self.token_bytes,
                )
        return self.cache

    def _step_for(self, cache: KVCache, sampling: Sampling) -> tuple[DecodeStep, GraphedStep | None]:
        """Return the step for these settings, and its graphs if the loop uses graphs.

        Both are valid for fixed addresses of weights, cache and state.
        """
        module = self.model.module
        addresses = [tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]]
        if self._state is None or addresses != self._addresses:
            self._steps.clear()
            self._state, self._addresses = DecodeState(cache.size.sequences, WINDOW + 1, self.device), addresses
        settings = replace(sampling, seed=0, stop=(), pad_id=0, max_new_tokens=max(1, sampling.min_new_tokens))
        step_and_graphs = self._steps.pop(settings, None)
        if step_and_graphs is None:
            step = DecodeStep(self.model, cache, self._state, settings)
            scratch = cache.size.sequences
            step_and_graphs = step, GraphedStep(step, self._state.step, scratch=scratch) if self.use_graphs else None
        self._steps[settings] = step_and_graphs
        while len(self._steps) > MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        return step_and_graphs

    def _bound(self) -> int:
        """Return the bytes that keys and values may take."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        sharing = dist.world().size if self.device.type == "cpu" else 1
        return free_bytes(self.device) // (2 * sharing)

    @torch.inference_mode()
    def _try(self) -> int:
        """Run a few tokens as a chunk and one as a row; return the bytes of a cached token.

        Raises UnsupportedModel if the cache does not support the model.
        """
        module, device = self.model.module, self.device
        prompt = fixed_prompts(module)[0]
        cache, last = KVCache(CacheSize(1, len(prompt), 2, 1), device), len(prompt) - 1
        token_ids, positions = upload([prompt, [*range(last + 1)]], device)
        places = upload([[0], [0], [last + 1], [0], [last], [0]], device)
        row = StepTokens(cache, DecodeRows(*places))
        try:
            logits = []
            if last:
                chunk = StepTokens(cache, None, [Chunk(0, prompt[:last], 0)])
                logits.append(self.model(token_ids[:last], positions[:last], chunk))
            logits.append(self.model(token_ids[last:], positions[last:], row))
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
        if logits_differ(module, torch.cat(logits), plain):
            raise UnsupportedModel("its logits differ from those of its plain forward")
        return cache.token_bytes
