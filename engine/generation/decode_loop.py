"""The decode loop: sequences of any lengths share forwards, and a new sequence starts when another one ends.

A forward carries its tokens in one row (1, N), whichever sequence they belong to, so nothing is padded. On CPUs, and if
the generator is streamed or split over ranks, the host reads the tokens of each step before it plans the next. With
CUDA graphs the host launches WINDOW replays of the step at a time. While the device runs them, the host reads the
tokens of the replays before. Only the host detects stop strings, so the device may decode tokens after the end of an
answer. The host drops these tokens.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.generation.attention import DecodeRows, Step
from engine.generation.cuda_graph import GraphedStep
from engine.generation.decode_step import NOTHING, DecodeState, DecodeStep, SlotModel
from engine.generation.kv_cache import CacheDemand, CacheSize, KVCache, free_bytes
from engine.generation.parity_check import (
    UnsupportedModel,
    check_model,
    counts_from_zero,
    far_apart,
    fixed_prompts,
    has_window,
    plain_logits,
)
from engine.generation.sampling import Sampled, Sampling, under_seed
from engine.generation.scheduler import ActiveSequence, Chunk, Scheduler
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
        self._steps: dict[Sampling, tuple[DecodeStep, GraphedStep]] = {}
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
        step, graphs = self._step_for(cache, sampling)
        return iter(_Call(step, graphs if self.use_graphs else None, scheduler, sampling, sample_seeds, ends))

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

    def _step_for(self, cache: KVCache, sampling: Sampling) -> tuple[DecodeStep, GraphedStep]:
        """Return the step for these settings. Steps are valid for fixed addresses of weights, cache and state."""
        module = self.model.module
        addresses = [tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]]
        if self._state is None or addresses != self._addresses:
            self._steps.clear()
            self._state, self._addresses = DecodeState(cache.size.sequences, WINDOW + 1, self.device), addresses
        settings = replace(sampling, seed=0, stop=(), pad_id=0, max_new_tokens=max(1, sampling.min_new_tokens))
        step_and_graphs = self._steps.pop(settings, None)
        if step_and_graphs is None:
            step = DecodeStep(self.model, cache, self._state, settings)
            step_and_graphs = step, GraphedStep(step, self._state.step, scratch=cache.size.sequences)
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
        row = Step(cache, DecodeRows(*places))
        try:
            logits = []
            if last:
                chunk = Step(cache, None, [Chunk(0, prompt[:last], 0)])
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
        if far_apart(module, torch.cat(logits), plain):
            raise UnsupportedModel("its logits differ from those of its plain forward")
        return cache.token_bytes


@dataclass(frozen=True)
class _Launch:
    """Launched steps: the request in each slot, the number of steps, and a function that waits for their tokens."""

    requests: dict[int, int]
    steps: int
    wait: Callable[[], tuple[Tensor, Tensor]]

    def sampled(self) -> Iterator[list[Sampled]]:
        """Wait for the device, and yield the tokens of each step."""
        tokens, logprobs = (each[: self.steps].tolist() for each in self.wait())
        for step_tokens, step_logprobs in zip(tokens, logprobs, strict=True):
            sampled = [(request, step_tokens[slot], step_logprobs[slot]) for slot, request in self.requests.items()]
            yield [each for each in sampled if each[1] != NOTHING]


class _Call:
    """One call of the loop. Iteration yields the tokens of each step."""

    def __init__(
        self,
        step: DecodeStep,
        graphs: GraphedStep | None,
        scheduler: Scheduler,
        sampling: Sampling,
        sample_seeds: Sequence[int],
        ends: Callable[[int, int], bool],
    ) -> None:
        self.step, self.graphs, self.scheduler, self.ends = step, graphs, scheduler, ends
        self.limit = sampling.max_new_tokens
        self.seeds = under_seed(sampling.seed, torch.tensor(sample_seeds, dtype=torch.int64)).tolist()
        self.counts = [0] * len(sample_seeds)  # tokens that the host has read of each request
        self.live = set(range(len(sample_seeds)))
        self._rows: list[list[int]] = [[], []]
        self._chosen = torch.empty(2, 0, dtype=torch.int64, device=step.model.device)

    def __iter__(self) -> Iterator[list[Sampled]]:
        turn, pending = 0, deque[_Launch]()
        while self.scheduler.busy or pending:
            with torch.inference_mode():
                launch = self._launch(turn)
            if launch is not None:
                pending.append(launch)
                turn += 1
            assert pending, "no step runs and no answer ends"
            behind = 1 if self.graphs is not None and launch is not None else 0
            while len(pending) > behind:
                yield from self._read(pending.popleft())

    def _launch(self, turn: int) -> _Launch | None:
        """Launch the next steps. Return None if every sequence has reached its limit and no request waits."""
        scheduler, step = self.scheduler, self.step
        plan = scheduler.plan()
        for copy in plan.copies:
            step.cache.copy_prefix(*copy)
        step.state.clear()
        steps = 0
        rows = self._below_limit(plan.decoding) if plan.chunks or self.graphs is None else []
        if rows or plan.chunks or plan.starting:
            step.run(plan, self._choose(rows), [self._table_row(sequence) for sequence in plan.starting])
            steps = 1
            for sequence in [*rows, *plan.starting]:
                sequence.sampled += 1
        if self.graphs is not None and (rows := self._below_limit(scheduler.decoding)):
            times = min(WINDOW, max(self.limit - sequence.sampled for sequence in rows))
            self.graphs.run(*_slots_and_firsts(rows), times)
            steps += times
            for sequence in rows:
                sequence.sampled += times
        if not steps:
            return None
        return _Launch({s.slot: s.request for s in scheduler.decoding}, steps, step.state.copy_to_host(turn))

    def _read(self, launch: _Launch) -> Iterator[list[Sampled]]:
        """Yield the tokens of a launch's steps, and free the slots of the answers that ended."""
        for sampled in launch.sampled():
            sampled = [one for one in sampled if one[0] in self.live]
            if sampled:
                yield sampled
            ended = {request for request, token, _ in sampled if self._has_ended(request, token)}
            if ended:
                self.live -= ended
                self.scheduler.finish(ended)

    def _has_ended(self, request: int, token: int) -> bool:
        self.counts[request] += 1
        return self.ends(request, token) or self.counts[request] == self.limit

    def _below_limit(self, sequences: Sequence[ActiveSequence]) -> list[ActiveSequence]:
        return [sequence for sequence in sequences if sequence.sampled < self.limit]

    def _choose(self, rows: Sequence[ActiveSequence]) -> Tensor:
        """Return slots and firsts (2, B) on the device. Reuse the tensor of the previous step if both are unchanged."""
        chosen = [*_slots_and_firsts(rows)]
        if chosen != self._rows:
            self._rows, self._chosen = chosen, upload(chosen, self.step.model.device)
        return self._chosen

    def _table_row(self, sequence: ActiveSequence) -> list[int]:
        """Return the table row of a sequence whose prompt is complete and whose first token is not yet sampled."""
        prompt = sequence.prompt
        length, seed = len(prompt.tokens), self.seeds[sequence.request]
        return [prompt.tokens[-1], length - 1, seed, 0, self.limit, 0, prompt.slot, length]


def _slots_and_firsts(rows: Sequence[ActiveSequence]) -> tuple[list[int], list[int]]:
    """Return the slot of each row, and the first of its neighbours with the same prompt."""
    firsts: list[int] = []
    for index, sequence in enumerate(rows):
        same = index > 0 and rows[index - 1].prompt is sequence.prompt
        firsts.append(firsts[-1] if same else index)
    return [sequence.slot for sequence in rows], firsts
