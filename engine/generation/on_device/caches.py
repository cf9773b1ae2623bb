"""What static steps keep of keys and values: prompts in slots that samples share, answers in slots of their own.

A prompt is cached once, however many answers it gets, and whenever those begin: memory for prompts is as many tokens as
prompts are answered at a time, not as sequences are.
"""

from dataclasses import dataclass

from engine.generation.cache.slots import SlotCache, SlotLayer

ROUND_CAPACITY = 64
WORTH_JOINING = 128  # tokens of a prompt, two steps of a share: with fewer another launch a layer is not
WAITING = 2  # slots for prompts where memory is short, by as many as fill the slots for answers at once


@dataclass(frozen=True)
class Caches:
    """The last slot for answers is scratch."""

    prompts: SlotCache
    answers: SlotCache

    @property
    def slots(self) -> int:
        """How many sequences may run at a time."""
        return self.answers.slots - 1

    def layer(self, index: int) -> tuple[SlotLayer, SlotLayer]:
        """A layer's prompts, which are there, and its answers."""
        prompts = self.prompts.layers[index]
        return prompts, self.answers.layer(index, prompts.keys, prompts.values)

    def take(self) -> None:
        """Have memory for answers in all layers of which there is a prompt: no step may take any."""
        for index in self.prompts.layers:
            self.layer(index)


@dataclass(frozen=True)
class Demand:
    """What a call asks for: tokens of its longest prompt, of its longest answer, prompts that differ, sequences, and
    how many of these are wanted at a time.
    """

    prompt_tokens: int
    answer_tokens: int
    prompts: int
    sequences: int
    slots: int

    def is_met_by(self, caches: Caches, slots: int) -> bool:
        """Whether so many sequences may run in these, or all that are wanted."""
        return (
            caches.prompts.capacity >= self.prompt_tokens
            and caches.answers.capacity > self.answer_tokens
            and caches.slots >= min(slots, self.slots)
            and caches.prompts.slots >= self._least_prompts(min(slots, self.slots))
        )

    def fitting(self, tokens: int) -> Caches:
        """Caches of at most so many tokens in all, but room for one sequence."""
        prompt, answer = _rounded(self.prompt_tokens), _rounded(self.answer_tokens + 1)
        slots = self.slots
        while slots > 1 and (slots + 1) * answer + self._least_prompts(slots) * prompt > tokens:
            slots -= 1
        room = (tokens - (slots + 1) * answer) // prompt
        prompts = max(self._least_prompts(slots), min(room, slots, self.prompts))
        return Caches(SlotCache(prompts, prompt), SlotCache(slots + 1, answer))

    def _least_prompts(self, slots: int) -> int:
        """Slots for prompts under which sequences seldom wait for one: long answers keep theirs."""
        return min(slots, self.prompts, -(-WAITING * slots * self.prompts // self.sequences))


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND_CAPACITY) * ROUND_CAPACITY
