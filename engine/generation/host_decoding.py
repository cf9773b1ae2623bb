"""Continuous batching where the host learns of every token at once: on CPUs, and where no steps are captured."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.generation.cache.grouping import Grouping
from engine.generation.cache.groups import Chunk
from engine.generation.cache.slots import SlotCache, Step
from engine.generation.sampling import Sampling, forbid, penalise, uniforms
from engine.generation.scheduler import Answering, Scheduler
from engine.kernels import draw

Drawn = tuple[int, int, float]  # the prompt's place, the token, its log-probability
Carried = TypeVar("Carried")


class Decoding(Generic[Carried]):
    """One call's work; iterating yields what each forward drew. `cache` is where prompts are; `forward` runs token ids,
    laid out by `lay_out`, and returns the logits after chosen ones.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[int], Carried, Sequence[int]], Tensor],
        cache: SlotCache,
        scheduler: Scheduler,
        sampling: Sampling,
        streams: Sequence[int],
        ends: Callable[[int, int], bool],
        device: torch.device,
    ) -> None:
        self.forward, self.cache, self.scheduler, self.sampling, self.ends = forward, cache, scheduler, sampling, ends
        self.device = device
        places = torch.arange(sampling.max_new_tokens, device=device)
        self.draws = uniforms(sampling.seed, torch.tensor(streams, device=device)[:, None], places)  # (n, max new)
        self._seen: Tensor | None = None  # (slots, V), for the repetition penalty

    def lay_out(self, decoding: Sequence[Answering], chunks: Sequence[Chunk]) -> Carried:
        """What attention is told of a forward: a token of each sequence, then chunks of prompts."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[list[Drawn]]:
        while self.scheduler.busy:
            with torch.inference_mode():
                drawn = self._step()
            if drawn:
                yield drawn
                self._finish(drawn)

    def _step(self) -> list[Drawn]:
        """One forward, and a token for each sequence whose tokens are all in the cache."""
        scheduler, cache = self.scheduler, self.cache
        for source, target, tokens in scheduler.admit():
            cache.copy_prefix(source, target, tokens)
        chunks, members = scheduler.chunks()
        decoding = list(scheduler.decoding)
        token_ids = [s.last for s in decoding]
        for chunk, member in zip(chunks, members, strict=True):
            token_ids += member.prompt[chunk.start : chunk.length]
        whole = [(c.end - 1, m) for c, m in zip(chunks, members, strict=True) if c.length == len(m.prompt)]
        keep = [*range(len(decoding)), *(column for column, _ in whole)]
        logits = self.forward(token_ids, self.lay_out(decoding, chunks), keep)
        for sequence in decoding:
            sequence.cached += 1
        for copy in scheduler.ran(members, chunks):
            cache.copy_prefix(*copy)
        speakers = [[sequence] for sequence in decoding] + [[member, *member.followers] for _, member in whole]
        if any(len(each) > 1 for each in speakers):
            logits = logits[[row for row, each in enumerate(speakers) for _ in each]]
        return self._draw(logits, [*chain.from_iterable(speakers)]) if keep else []

    def _draw(self, logits: Tensor, sequences: Sequence[Answering]) -> list[Drawn]:
        """Draw the next token of each sequence: logits (n, V)."""
        sampling = self.sampling
        early = [row for row, s in enumerate(sequences) if s.drawn < sampling.min_new_tokens]
        if early and sampling.end_ids:
            logits[early] = forbid(logits[early], sampling.end_ids)
        if sampling.repetition_penalty != 1:
            logits = penalise(logits, self._seen_by(sequences, logits.shape[-1]), sampling.repetition_penalty)
        places = [s.request * sampling.max_new_tokens + s.drawn for s in sequences]
        draws = self.draws.take(torch.tensor(places, device=self.device))
        tokens, logprobs = draw(logits, sampling, draws)
        drawn = list(zip([s.request for s in sequences], tokens.tolist(), logprobs.tolist(), strict=True))
        for sequence, (_, token, _) in zip(sequences, drawn, strict=True):
            sequence.last, sequence.drawn = token, sequence.drawn + 1
        return drawn

    def _seen_by(self, sequences: Sequence[Answering], vocabulary: int) -> Tensor:
        """(n, V): which tokens stand in each sequence."""
        if self._seen is None:
            self._seen = torch.zeros(self.scheduler.slots, vocabulary, dtype=torch.bool, device=self.device)
        for sequence in sequences:
            if sequence.drawn == 0:
                self._seen[sequence.slot] = False
                self._seen[sequence.slot, list(sequence.prompt)] = True
            else:
                self._seen[sequence.slot, sequence.last] = True
        return self._seen[[sequence.slot for sequence in sequences]]

    def _finish(self, drawn: Sequence[Drawn]) -> None:
        ended = {request for request, token, _ in drawn if self.ends(request, token)}
        ended |= {s.request for s in self.scheduler.decoding if s.drawn == self.sampling.max_new_tokens}
        if ended:
            self.scheduler.finish(ended)


class SlotDecoding(Decoding[Step]):
    """Where a sequence's slot has its prompt, too."""

    def __init__(self, groups: Grouping, *call: Any) -> None:
        """`groups` cuts the rows that decode; the rest is `Decoding`'s."""
        super().__init__(*call)
        self.groups = groups

    def lay_out(self, decoding: Sequence[Answering], chunks: Sequence[Chunk]) -> Step:
        slots, positions = [s.slot for s in decoding], [s.cached for s in decoding]
        for chunk in chunks:
            slots += [chunk.slot] * (chunk.length - chunk.start)
            positions += range(chunk.start, chunk.length)
        where = torch.tensor([slots, positions], device=self.device)
        return Step(self.cache, where[0], where[1], self.groups(decoding), chunks)
