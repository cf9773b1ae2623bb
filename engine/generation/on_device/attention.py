"""Attention of a static step: one new token a sequence, over the slot caches, told of everything by tensors."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from engine.generation.attention import Unserved, check_served
from engine.generation.on_device.caches import Caches
from engine.kernels import decode_attention, write_tokens
from engine.kernels.decode_attention import Prompts

NAME = "zerochat_static_slots"


@dataclass(frozen=True)
class Queries:
    """What attention is told of one step, (b,) each: the rows' own slots, where in those the new tokens go, tokens seen
    (0: look at nothing), the prompts' slots and how many tokens of each row are there; `firsts` as in `Prompts`.
    """

    caches: Caches
    slots: Tensor
    places: Tensor
    lengths: Tensor
    prompts: Tensor
    shared: Tensor
    firsts: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.caches.prompts.capacity + self.caches.answers.capacity


def static_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    slots: Queries | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, b, head size), key and value (1, key heads, b, head size) of one token a sequence.

    Returns (1, b, heads, value's head size). Raises Unserved.
    """
    if slots is None or attention_mask is not None:
        raise Unserved(f"{type(module).__name__} asks for another kind of attention")
    check_served(module, others)
    prompts, layer = slots.caches.layer(module.layer_idx)  # type: ignore[arg-type]
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # (b, key heads, head size)
    write_tokens(new_keys, new_values, layer.keys, layer.values, slots.slots, slots.places)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = query[0].transpose(0, 1)  # (b, heads, head size)
    before = Prompts(prompts.keys, prompts.values, slots.prompts, slots.shared, slots.firsts)
    out = decode_attention(
        queries, layer.keys, layer.values, slots.slots, slots.lengths, scale, sliding_window, None, softcap, before
    )
    return out[None], None


AttentionInterface.register(NAME, static_attention)
