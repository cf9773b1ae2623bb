"""Conversations as tokens, and a step's conversations as this rank's micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.parallel import dist
from pipeline.config.schema import SftSection
from pipeline.data.batch import TokenBatch, collate_tokens, pack_tokens, plan
from pipeline.data.records import Conversation
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError


@dataclass(frozen=True)
class Item:
    """One conversation: its token ids, and which of them count in the loss (never the first)."""

    ids: list[int]
    counts: list[bool]


def encode(conversations: Sequence[Conversation], tokenizer: ChatTokenizer, section: SftSection) -> list[Item]:
    """Tokenize, cut at `max_length`, and drop what then has nothing to learn from."""
    items = []
    for conversation in conversations:
        ids, counts = tokenizer.encode_conversation(conversation.messages)
        ids, counts = ids[: section.max_length], counts[: section.max_length]
        if section.loss_on == "all":
            counts = [True] * len(ids)
        counts[0] = False
        if any(counts):
            items.append(Item(ids, counts))
    if not items and conversations:
        raise UserError(
            f"no conversation has an answer within sft.max_length={section.max_length} tokens; raise sft.max_length"
        )
    return items


def micro_batches(
    items: Sequence[Item], indices: Sequence[int], section: SftSection, packing: bool, pad_id: int
) -> tuple[list[TokenBatch], int]:
    """This rank's micro-batches of the global batch `indices`, and the number of tokens that count in all of it."""
    world = dist.world()
    chosen = [items[i] for i in indices]
    planned = plan(
        [len(item.ids) for item in chosen],
        ranks=world.size,
        budget=section.micro_batch_tokens,
        packing=packing,
        max_length=section.max_length,
    )[world.rank]
    batches = []
    for places in planned:
        rows = [(chosen[i].ids, chosen[i].counts) for i in places]
        batch = pack_tokens(rows, pad_id, section.max_length) if packing else collate_tokens(rows, pad_id)
        batches.append(batch.to(world.device))
    return batches, sum(sum(item.counts) for item in chosen)
