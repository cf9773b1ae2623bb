"""Held-out accuracy: overall, by source, and by which answer is longer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from engine import Engine
from pipeline.data.batch import PairBatch
from pipeline.data.encode import PairItem
from pipeline.over_ranks import in_order
from step2_reward.batches import micro_batches
from step2_reward.loss import last_scores


@dataclass(frozen=True)
class Scored:
    """One pair's scores."""

    pair: PairItem
    chosen: float
    rejected: float

    @property
    def right(self) -> bool:
        return self.chosen > self.rejected


def score_pairs(engine: Engine, pairs: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> list[Scored]:
    """Score pairs, the work spread over ranks; all of them, in order, on every rank."""
    if not pairs:
        return []
    batches, places = micro_batches(pairs, budget=budget, packing=packing, pad_id=pad_id)
    mine: dict[int, tuple[float, float]] = {}
    for where, scores in zip(places, engine.score(batches, both_scores), strict=True):
        mine |= {place: (pair[0].item(), pair[1].item()) for place, pair in zip(where, scores, strict=True)}
    return [Scored(pair, *scores) for pair, scores in zip(pairs, in_order(mine), strict=True)]


def both_scores(module: nn.Module, batch: PairBatch) -> Sequence[Tensor]:
    """Scores (2,) of the chosen and the rejected side of each pair."""
    values, count = module(batch.input_ids, documents=batch.documents), len(batch.margins)
    return last_scores(values, batch.ends)[: 2 * count].view(2, count).unbind(1)


def accuracies(scored: Sequence[Scored]) -> dict[str, float | dict[str, float] | None]:
    """Shares of pairs in which the chosen answer scores higher; None where there are no such pairs."""
    longer = [s for s in scored if len(s.pair.chosen) > len(s.pair.rejected)]
    shorter = [s for s in scored if len(s.pair.chosen) < len(s.pair.rejected)]
    sources = sorted({s.pair.source for s in scored})
    by_source = {name: _share([s for s in scored if s.pair.source == name]) or 0.0 for name in sources}
    return {
        "eval_accuracy": _share(scored),
        "eval_accuracy_by_source": by_source,
        "eval_accuracy_chosen_longer": _share(longer),
        "eval_accuracy_rejected_longer": _share(shorter),
        "eval_pairs": float(len(scored)),
    }


def _share(scored: Sequence[Scored]) -> float | None:
    return sum(s.right for s in scored) / len(scored) if scored else None
