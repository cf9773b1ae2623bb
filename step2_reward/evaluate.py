"""Scores of held-out pairs."""

from collections.abc import Sequence

from torch import Tensor, nn

from engine import Engine
from pipeline.data.batch import PairBatch
from pipeline.data.encode import PairItem
from pipeline.distributed import gather_by_index
from pipeline.evaluation.pair_accuracy import Scored
from step2_reward.batches import micro_batches
from step2_reward.loss import last_scores


def score_pairs(engine: Engine, pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> list[Scored]:
    """Score pairs, the work spread over ranks; all of them, in order, on every rank."""
    if not pairs:
        return []
    batches, places = micro_batches(pairs, budget=budget, packing=packing, pad_id=pad_id)
    mine: dict[int, tuple[float, float]] = {}
    for where, scores in zip(places, engine.score(batches, both_scores), strict=True):
        mine |= {place: (pair[0].item(), pair[1].item()) for place, pair in zip(where, scores, strict=True)}
    return [Scored(pair, *scores) for pair, scores in zip(pairs, gather_by_index(mine), strict=True)]


def both_scores(module: nn.Module, batch: PairBatch) -> Sequence[Tensor]:
    """Scores (2,) of the chosen and the rejected side of each pair."""
    values, count = module(batch.input_ids, documents=batch.documents), len(batch.margins)
    return last_scores(values, batch.ends)[: 2 * count].view(2, count).unbind(1)
