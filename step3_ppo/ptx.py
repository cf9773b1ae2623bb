"""Pretraining mix: the SFT loss as a term of the policy's update, against forgetting (Ouyang et al., 2022, eq. 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.config.schema import RunConfig
from pipeline.data.batch import TokenBatch, batch_indices, collate_tokens, pack_tokens
from pipeline.data.encode import TokenItem, encode_conversations
from pipeline.data.microbatches import local_microbatches
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import on_rank_zero
from pipeline.stages.data import stage_records


@dataclass(frozen=True)
class PtxBatch:
    """This rank's micro-batches; `tokens` are the target tokens of the global batch, `coef` weighs their mean loss."""

    batches: list[TokenBatch]
    tokens: int
    coef: float


@dataclass(frozen=True)
class PtxMix:
    """SFT conversations, `size` of them for each optimizer step of the policy."""

    items: Sequence[TokenItem]
    coef: float
    size: int
    budget: int
    pad_id: int
    seed: int

    def batch(self, step: int, *, packing: bool = False) -> PtxBatch:
        """Return the conversations of optimizer step `step`, counted from 0."""
        items = [self.items[i] for i in batch_indices(len(self.items), self.size, self.seed, step)]
        lengths = [len(item.ids) for item in items]
        collate = partial(pack_tokens if packing else collate_tokens, pad_id=self.pad_id)
        batches, _ = local_microbatches(items, lengths, collate, budget=self.budget, packing=packing)
        return PtxBatch(batches, sum(int(item.counts[1:].sum()) for item in items), self.coef)


def ptx_mix(config: RunConfig, tokenizer: ChatTokenizer) -> PtxMix | None:
    """Return the pretraining mix of the configuration; None if `ppo.ptx_coef` is 0."""
    ppo = config.ppo
    if ppo.ptx_coef == 0.0:
        return None
    sft, records = config.sft, stage_records(config, "sft").train
    encode = partial(encode_conversations, tokenizer, max_length=sft.max_length, loss_on=sft.loss_on)
    items, _ = on_rank_zero(partial(encode, records))
    size = max(1, ppo.batch_size // ppo.minibatches)
    return PtxMix(items, ppo.ptx_coef, size, ppo.micro_batch_tokens, tokenizer.pad_id, config.seed)
