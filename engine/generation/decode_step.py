"""One decode step: the forward, the sampling, and the update of the table of sequences on the device.

A row of the table is the state of a sequence: six int64 columns, one row per answer slot. A step reads the rows of its
slots, runs the model's own forward with attention over the key-value cache, samples, tests for the end of each answer
and writes the rows back. A step without chunks of prompts reads no number on the host and allocates nothing that
outlives it, so a CUDA graph can replay it.

Shapes: B rows of a step, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engine.generation.attention import AttentionByName, DecodeRows, StepTokens
from engine.generation.kv_cache import KVCache
from engine.generation.prepacked_linears import PrepackedLinears
from engine.generation.sampling import RawLogprobs, Sampling, penalise, raw_logprobs, uniforms
from engine.generation.scheduler import Chunk
from engine.host_memory import upload
from engine.kernels import sample

# TOKEN: the newest token, which the next step runs. CACHED: the number of tokens in the cache. COUNT: the tokens that
# were sampled. LIMIT: the largest COUNT; 0 after an end token. PROMPT: prompt slot. SHARED: the number of tokens that
# are in the prompt slot; the others are in the row's own slot.
COLUMNS = TOKEN, CACHED, COUNT, LIMIT, PROMPT, SHARED = range(6)
NOTHING = -1  # the token of a row whose answer ended before this step


class SlotModel:
    """A model that runs one row of tokens and attends over a key-value cache."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.packs = PrepackedLinears(module)
        self._attention = AttentionByName(module)
        self._computes_last_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def __call__(self, token_ids: Tensor, positions: Tensor, step: StepTokens) -> Tensor:
        """Run token ids (N,) at positions (N,); return the logits (B, V) after the last B of them, the step's rows."""
        count = len(step.rows.slots)
        last = {"logits_to_keep": max(1, count)} if self._computes_last_logits else {}  # 0 would keep all
        with self._attention.applied(), self.packs.applied():
            output = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, step=step, **last
            )
        logits: Tensor = output.logits[0]
        return logits[len(logits) - count :]


class DecodeState:
    """The table of the sequences on the device, their random numbers, and the tokens of the last steps.

    rows: (slots + 1, 6) int64, with the columns COLUMNS; the last row is scratch. uniforms: (slots + 1, capacity + 1)
    fp32, the number of each token of an answer; an answer that has ended reads the last one, which is not used. tokens:
    (steps, slots + 1) int64, NOTHING where a step sampled no token. logprobs: (steps, slots + 1) fp32. step: () int64,
    the index of the newest step.
    """

    def __init__(self, slots: int, steps: int, capacity: int, device: torch.device) -> None:
        """`capacity`: the most tokens of an answer."""
        self.rows = torch.zeros(slots + 1, len(COLUMNS), dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(slots + 1, capacity + 1, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(steps, slots + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(steps, slots + 1, dtype=torch.float32, device=device)
        self.step = torch.full((), -1, dtype=torch.int64, device=device)
        # The host reads one copy while the next one is written. Pinned memory lets a GPU copy in the background.
        self._host = [
            tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in (self.tokens, self.logprobs))
            for _ in range(2)
        ]

    def start(self, slots: Sequence[int], rows: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Write the rows of starting sequences, and their random numbers. seeds: results of `combine_seeds`."""
        device = self.rows.device
        indices, positions = upload(slots, device), torch.arange(self.uniforms.shape[1], device=device)
        self.rows.index_copy_(0, indices, upload(rows, device))
        self.uniforms.index_copy_(0, indices, uniforms(upload(seeds, device)[:, None], positions))

    def clear(self) -> None:
        """Clear the tokens of the last steps."""
        self.tokens.fill_(NOTHING)
        self.step.fill_(-1)

    def read(self, chosen: Tensor) -> DecodeRows:
        """Return the rows of the next step, and advance `step`. chosen (2, B): as in `DecodeStep.run`."""
        self.step.add_(1)
        tokens, cached, counts, limits, prompts, shared = self.rows.index_select(0, chosen[0]).t().contiguous().unbind()
        live = counts < limits  # an answer that has ended writes to the first place of its slot, not behind the last
        lengths, offsets = (cached + 1) * live, (cached - shared) * live
        return DecodeRows(chosen[0], tokens, cached, counts, offsets, lengths, prompts, shared, chosen[1])

    def write(self, slots: Tensor, tokens: Tensor, logprobs: Tensor, end_ids: Tensor, seen: Tensor | None) -> None:
        """Store the sampled tokens (B,) int64 and log-probabilities (B,) fp32 of slots (B,).

        The cache contains the token of the previous step. An answer ends with one of `end_ids` (E,) or at its limit. A
        row that had ended stores NOTHING, and only its TOKEN column changes. seen: (slots + 1, V) bool, True for the
        tokens of a sequence. A slot may occur twice in `slots` if its answer has ended.
        """
        row = self.rows.index_select(0, slots)
        live = row[:, COUNT] < row[:, LIMIT]
        row[:, TOKEN] = tokens
        row[:, CACHED:LIMIT] += live[:, None]  # CACHED and COUNT
        row[:, LIMIT] *= (tokens[:, None] != end_ids).all(1)
        self.rows.index_copy_(0, slots, row)
        indices = self.step * self.tokens.shape[1] + slots
        self.tokens.view(-1).index_copy_(0, indices, torch.where(live, tokens, NOTHING))
        self.logprobs.view(-1).index_copy_(0, indices, logprobs)
        if seen is not None:
            seen.view(-1).index_fill_(0, slots * seen.shape[1] + tokens, True)

    def copy_to_host(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start a copy of tokens and log-probabilities; return a function that waits for it and returns both."""
        self._host.reverse()
        tokens, logprobs = self._host[0]
        tokens.copy_(self.tokens, non_blocking=True)
        logprobs.copy_(self.logprobs, non_blocking=True)
        event = torch.cuda.Event() if self.rows.is_cuda else None
        if event is not None:
            event.record()

        def wait() -> tuple[Tensor, Tensor]:
            if event is not None:
                event.synchronize()
            return tokens, logprobs

        return wait


class Sampler:
    """Sampling settings with the tensors that they need. A step may sample its rows under several settings.

    A sampler ignores the seed of the settings, which is part of the seeds of the sequences (`DecodeState.start`).
    """

    def __init__(self, sampling: Sampling, state: DecodeState, vocabulary: int) -> None:
        self.sampling, self.state = sampling, state
        self.raw_logprobs: dict[int, RawLogprobs] = {}  # by slot, of the newest token, if the settings need them
        device = state.rows.device
        self._end_ids = torch.tensor(sampling.end_ids, dtype=torch.int64, device=device)
        self._seen: Tensor | None = None  # (slots + 1, V): the tokens of each sequence, for the repetition penalty
        self._forbidden: Tensor | None = None  # (V,): the tokens that end an answer, if there is a minimum length
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(state.rows.shape[0], vocabulary, dtype=torch.bool, device=device)
        if sampling.min_new_tokens > 0 and sampling.end_ids:
            self._forbidden = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._forbidden.index_fill_(0, self._end_ids, True)

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """Mark the tokens of the prompt of a starting sequence."""
        if self._seen is not None:
            self._seen[slot].fill_(False).index_fill_(0, upload(prompt, self._seen.device), True)

    def __call__(self, slots: Tensor, counts: Tensor, logits: Tensor) -> None:
        """Sample a token of each slot (B,) from logits (B, V) with counts (B,), and write it into the table."""
        raw = logits
        if self._forbidden is not None:
            too_short = counts < self.sampling.min_new_tokens
            logits = logits.masked_fill(self._forbidden & too_short[:, None], float("-inf"))
        if self._seen is not None:
            logits = penalise(logits, self._seen.index_select(0, slots), self.sampling.repetition_penalty)
        settings = self.sampling
        tokens, logprobs = sample(
            logits, self.state.uniforms[slots, counts],
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p,
        )  # fmt: skip
        self.state.write(slots, tokens, logprobs, self._end_ids, self._seen)
        if self.sampling.top_logprobs is not None:
            computed = raw_logprobs(raw, tokens, self.sampling.top_logprobs)
            self.raw_logprobs = dict(zip(slots.tolist(), computed, strict=True))


class DecodeStep:
    """The decode steps over one cache, which sample with any samplers."""

    def __init__(self, model: SlotModel, cache: KVCache, steps: int) -> None:
        """`steps`: the most steps between two reads of their tokens."""
        self.model, self.cache = model, cache
        self.sessions = 0  # how many sessions have used this step
        self.state = DecodeState(cache.size.sequences, steps, cache.size.answer_capacity, model.device)

    def run(self, chosen: Tensor, chunks: Sequence[Chunk], samplers: Sequence[Sampler]) -> None:
        """Run chunks of prompts and one token of each row in one forward, and sample. Needs inference mode.

        chosen (2, B) int64: the slots of the rows, and of each the first neighbour with the same prompt. samplers: of
        each row, (B,), or a single one. A CUDA graph can capture the call without chunks.
        """
        rows = self.state.read(chosen)
        step, token_ids, positions = StepTokens(self.cache, rows, chunks), rows.tokens, rows.positions
        if chunks:
            of_chunks = upload([token for chunk in chunks for token in chunk.tokens], self.model.device)
            token_ids = torch.cat([of_chunks, token_ids])
            positions = torch.cat([step.chunk_positions[1], positions])
        drawn = rows.slots, rows.counts, self.model(token_ids, positions, step)
        different = dict.fromkeys(samplers)
        for sampler in different:
            if len(different) == 1:
                sampler(*drawn)
                return
            own = upload([row for row, other in enumerate(samplers) if other is sampler], self.model.device)
            sampler(*(each.index_select(0, own) for each in drawn))
