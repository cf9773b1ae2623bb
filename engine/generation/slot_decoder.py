"""Decoding by slots: sequences of any lengths side by side, new ones taking the place of those that end.

A forward carries its tokens in one row (1, N), whichever sequence they belong to, so nothing is padded. What a sequence
says depends on its prompt, the sampling settings and its stream, not on its slot or on what runs beside it.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.generation import attention
from engine.generation.attention import Unserved, routed
from engine.generation.cache.grouping import BY_TORCH, IN_C, Grouping, Joining
from engine.generation.cache.groups import Chunk, Group
from engine.generation.cache.slots import SlotCache, Step
from engine.generation.host_decoding import Drawn, SlotDecoding
from engine.generation.on_device import called
from engine.generation.on_device.caches import ROUND_CAPACITY, Caches, Demand
from engine.generation.on_device.called import CalledDecoding, Mixed
from engine.generation.on_device.forwards import Forwards
from engine.generation.on_device.rounds import DeviceDecoding, Rounds
from engine.generation.on_device.sharing import SharingScheduler
from engine.generation.packed import PackedLinears
from engine.generation.parity_check import counts_from_zero, far_apart, fixed_prompts, plain_logits
from engine.generation.sampling import Sampling
from engine.generation.scheduler import Scheduler
from engine.generation.served import check_model, has_window
from engine.kernels_cpu import decode_attention as host
from engine.oom import is_out_of_memory
from engine.parallel import dist
from engine.uploads import upload

log = logging.getLogger(__name__)
# Tokens of prompts a forward carries at most: bounds the activations, which on CPUs should stay in the caches.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}


class SlotDecoder:
    """A model that attends over a slot cache, which it keeps between calls.

    Making one tries the model with a few tokens; raises Unserved, saying why, where the model can't be decoded so.
    `replay` False runs every step through the modules. `ranks` are those whose sequences are decoded here.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        cache_bytes: int | None = None,
        *,
        replay: bool = True,
        ranks: int = 1,
    ) -> None:
        self.module, self.device, self.cache_bytes, self.ranks = module, device, cache_bytes, ranks
        self.packs = PackedLinears(module)
        self.keeps_logits = check_model(module)
        self.cache: SlotCache | None = None
        self._said_too_small = False
        # Then steps are captured, and the host follows a round behind.
        self.on_device = replay and device.type == "cuda"
        # Then prompts are cached apart from answers, once for all their samples.
        self.shares = device.type == "cuda"
        self._shared: Caches | None = None
        self._rounds: Rounds | None = None
        self._forwards = Forwards(module)
        self.token_bytes, self.token_numbers, self.dtype = self._probe()

    def release(self) -> None:
        """Free the cache, the packed weights and the graphs."""
        self.cache = self._shared = self._rounds = None
        self.packs.release()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        streams: Sequence[int],
        slots: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[Drawn]]:
        """Answer the prompts; yields what each forward drew. `ends` says if a prompt's answer ends with a token."""
        at_once, longest = PREFILL_TOKENS.get(self.device.type, 1024), max(len(prompt) for prompt in prompts)
        if self.on_device or self.shares:
            different = len({tuple(prompt) for prompt in prompts})
            caches = self._caches_for(Demand(longest, sampling.max_new_tokens, different, len(prompts), slots))
            slots = min(slots, caches.slots)
            sharing = SharingScheduler(prompts, slots, at_once, prompt_slots=caches.prompts.slots)
            if self.on_device:
                return iter(DeviceDecoding(self._rounds_over(caches), self.forward, sharing, sampling, streams, ends))
            mixed = partial(self._called, called.NAME)
            return iter(CalledDecoding(mixed, caches, sharing, sampling, streams, ends, self.device))
        cache = self._cache_for(longest + sampling.max_new_tokens, slots)
        scheduler = Scheduler(prompts, max(1, min(slots, cache.slots)), at_once)
        groups = Grouping(self.token_numbers, self._joining())
        return iter(SlotDecoding(groups, self.forward, cache, scheduler, sampling, streams, ends, self.device))

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], step: Step, keep: Sequence[int]) -> Tensor:
        """Run a step's N tokens; returns the logits (len(keep), V) after those at columns `keep`."""
        return self._called(attention.NAME, token_ids, step, keep)

    @torch.inference_mode()
    def _called(self, name: str, token_ids: Sequence[int], step: Step | Mixed, keep: Sequence[int]) -> Tensor:
        """The same by the modules, which attend by the function of this name."""
        extra: dict[str, Any] = {}
        columns = None if len(keep) == len(token_ids) else upload(keep or [0], self.device)
        if self.keeps_logits and columns is not None:
            extra["logits_to_keep"], columns = columns, None
        with routed(self.module, name), self.packs.applied():
            logits = self._logits(upload([token_ids], self.device), step.positions[None], step, **extra)[0]
        return logits if columns is None else logits[columns]

    def _logits(self, token_ids: Tensor, positions: Tensor, step: Step | Mixed, **extra: Any) -> Tensor:
        """The module's own forward: token ids (1, N), positions (1, N) -> logits (1, N, V)."""
        output = self.module(input_ids=token_ids, position_ids=positions, use_cache=False, slots=step, **extra)
        logits: Tensor = output.logits
        return logits

    def _joining(self) -> Joining | None:
        """What it costs to read a common prompt once; None where it is not done."""
        if self.device.type != "cpu":
            return None
        return IN_C if host.serves(self.dtype) else BY_TORCH

    def _probe(self) -> tuple[int, int, torch.dtype]:
        """Run a few tokens; returns the bytes of a token in the cache, its numbers a layer, and their type."""
        prompt = fixed_prompts(self.module)[0]
        cache, last = SlotCache(1, len(prompt)), len(prompt) - 1
        slot, positions = upload([[0] * (last + 1), [*range(last + 1)]], self.device)
        begun = Step(cache, slot[:last], positions[:last], [], [Chunk(0, last, 0, 0)])
        goes_on = Step(cache, slot[last:], positions[last:], [Group(0, 1, 0, (last + 1,))], [])
        try:
            own = counts_from_zero(self.module, self.device)
            found = [self.forward(prompt[:last], begun, [*range(last)])] if last else []
            found.append(self.forward(prompt[last:], goes_on, [0]))
        except Exception as problem:  # whatever a forward that wants something else may say
            if is_out_of_memory(problem):
                raise
            raise Unserved(str(problem).partition("\n")[0] or type(problem).__name__) from problem
        text: Any = self.module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        if len(cache.layers) != text.num_hidden_layers:
            raise Unserved(f"{len(cache.layers)} of its {text.num_hidden_layers} layers attend by name")
        if has_window(text) and goes_on.windows == {None}:
            raise Unserved("its sliding window does not reach the attention")
        if not own:
            raise Unserved("it counts positions in a way of its own")
        if far_apart(self.module, torch.cat(found), plain_logits(self.module, self.device, prompt)):
            raise Unserved("it says something else when it attends over the slot cache")
        return cache.token_bytes, cache.token_numbers, cache.layers[0].keys.dtype

    @property
    def caches(self) -> list[SlotCache]:
        """All that holds keys and values now."""
        shared = [] if self._shared is None else [self._shared.prompts, self._shared.answers]
        return shared if self.cache is None else [self.cache, *shared]

    def _cache_for(self, tokens: int, slots: int) -> SlotCache:
        """The cache at hand if it is large enough, else one for at most `slots` sequences of `tokens`, in bounds."""
        capacity = -(-tokens // ROUND_CAPACITY) * ROUND_CAPACITY
        affordable = self._bound() // (self.token_bytes * capacity)
        if affordable < 1:
            affordable = 1
            self._say_too_small(capacity)
        cache = self.cache
        if cache is None or cache.capacity < tokens or cache.slots < min(slots, affordable):
            self.cache = self._shared = self._rounds = cache = None  # free the old one first
            self.cache = cache = SlotCache(min(slots, affordable), capacity)
        return cache

    def _caches_for(self, demand: Demand) -> Caches:
        """Those at hand if they are large enough, else new ones, in bounds."""
        held = sum(cache.slots * cache.capacity for cache in self.caches)
        tokens = self._bound() // self.token_bytes + (held if self.cache_bytes is None else 0) // 2
        wanted = demand.fitting(tokens)
        if self._shared is None or not demand.is_met_by(self._shared, wanted.slots):
            self.cache = self._shared = self._rounds = None  # free the old ones first
            self._shared = wanted
            taken = sum(cache.slots * cache.capacity for cache in self.caches)
            if taken > tokens:
                self._say_too_small(taken)
        return self._shared

    def _rounds_over(self, caches: Caches) -> Rounds:
        """The steps at hand if they are still the module's and over these caches, else new ones."""
        if self._rounds is None or not self._rounds.fit:
            self._rounds = None  # free the old graphs first
            self._rounds = Rounds(self._forwards, caches, self.device)
        return self._rounds

    def _say_too_small(self, tokens: int) -> None:
        if not self._said_too_small:
            self._said_too_small = True
            log.warning(
                "the key-value cache may take %d bytes, and one sequence takes %d: one runs at a time, in those; "
                "rollout.cache_bytes bounds it",
                self._bound(),
                tokens * self.token_bytes,
            )

    def _bound(self) -> int:
        """Bytes that keys and values may take."""
        if self.cache_bytes is not None:
            return self.cache_bytes * self.ranks
        sharers = dist.world().size // self.ranks if self.device.type == "cpu" else 1
        return free_bytes(self.device) // (2 * sharers)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, what torch's allocator keeps for later included."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
