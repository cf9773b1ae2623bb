"""Pretraining mix: some of the SFT loss in the policy's update, against forgetting (Ouyang et al., 2022, eq. 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.parallel import dist
from pipeline.config.schema import RunConfig
from pipeline.data.batch import TokenBatch, batch_indices, collate_tokens, pack_tokens
from pipeline.data.encode import TokenItem, encode_conversations
from pipeline.data.microbatch import local_microbatches
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.distributed import on_rank_zero
from pipeline.stages.data import stage_records


@dataclass(frozen=True)
class PtxBatch:
    """This rank's micro-batches; `tokens` counts the global batch's, `coef` weighs their mean loss."""

    batches: list[TokenBatch]
    tokens: int
    coef: float


@dataclass(frozen=True)
class PtxMix:
    """Conversations that go along with the rollouts, `size` an optimizer step."""

    items: Sequence[TokenItem]
    coef: float
    size: int
    budget: int
    pad_id: int
    seed: int

    def batch(self, step: int, *, packing: bool = False) -> PtxBatch:
        """The conversations of optimizer step `step` (from 0)."""
        chosen = [self.items[i] for i in batch_indices(len(self.items), self.size, self.seed, step)]
        lengths = [len(item.ids) for item in chosen]
        lay_out = pack_tokens if packing else collate_tokens

        def collate(some: Sequence[TokenItem]) -> TokenBatch:
            return lay_out(some, self.pad_id).to(dist.world().device)

        batches, _ = local_microbatches(chosen, lengths, collate, budget=self.budget, packing=packing)
        return PtxBatch(batches, sum(int(item.counts[1:].sum()) for item in chosen), self.coef)


def ptx_mix(config: RunConfig, tokenizer: ChatTokenizer) -> PtxMix | None:
    """The mix that the configuration asks for; None without `ppo.ptx_coef`."""
    ppo = config.ppo
    if ppo.ptx_coef == 0.0:
        return None
    sft, records = config.sft, stage_records(config, "sft").train
    encode = partial(encode_conversations, tokenizer, max_length=sft.max_length, loss_on=sft.loss_on)
    items, _ = on_rank_zero(partial(encode, records))
    size = max(1, ppo.batch_size // ppo.minibatches)
    return PtxMix(items, ppo.ptx_coef, size, ppo.micro_batch_tokens, tokenizer.pad_id, config.seed)
