"""Pairs as tokens, and a step's pairs as this rank's micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.parallel import dist
from pipeline.config.schema import RewardSection
from pipeline.data.batch import PairBatch, collate_pairs, plan
from pipeline.data.records import Preference
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError


@dataclass(frozen=True)
class Pair:
    """Two full sequences, prompt and answer with its end token; `prompt_length` is how much they share by construction."""

    chosen: list[int]
    rejected: list[int]
    prompt_length: int
    margin: float
    source: str

    @property
    def length(self) -> int:
        return max(len(self.chosen), len(self.rejected))


def encode(
    preferences: Sequence[Preference], tokenizer: ChatTokenizer, section: RewardSection
) -> tuple[list[Pair], int]:
    """Tokenize; a cut answer keeps its end token. Returns the pairs and how many had a prompt that leaves no room."""
    pairs, dropped = [], 0
    for preference in preferences:
        prompt = tokenizer.encode_prompt(preference.prompt)
        room = section.max_length - len(prompt)
        if room < 2:
            dropped += 1
            continue
        chosen, rejected = (
            prompt + _fit(tokenizer.encode_answer(answer), room) for answer in (preference.chosen, preference.rejected)
        )
        margin = preference.margin if section.use_margin else 0.0
        pairs.append(Pair(chosen, rejected, len(prompt), margin, preference.source))
    if not pairs and preferences:
        raise UserError(f"no pair fits into reward.max_length={section.max_length} tokens; raise it")
    return pairs, dropped


def _fit(answer: list[int], room: int) -> list[int]:
    return answer if len(answer) <= room else [*answer[: room - 1], answer[-1]]


def micro_batches(
    pairs: Sequence[Pair], indices: Sequence[int], section: RewardSection, pad_id: int
) -> tuple[list[PairBatch], list[list[int]]]:
    """This rank's micro-batches of the global batch `indices`, and which pairs each holds (places in `indices`)."""
    world = dist.world()
    chosen = [pairs[i] for i in indices]
    planned = plan(
        [2 * pair.length for pair in chosen],
        ranks=world.size,
        budget=section.micro_batch_tokens,
        packing=False,
        max_length=2 * section.max_length,
    )[world.rank]
    batches = [collate_pairs([chosen[i] for i in places], pad_id).to(world.device) for places in planned]
    return batches, planned
