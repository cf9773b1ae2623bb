"""Held-out pairs as a model ranks them: how many as labelled, overall, by source, and by which answer is longer."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.data.encode import PairItem


@dataclass(frozen=True)
class Scored:
    """One pair and what its answers score: by a reward model, or as rewards of DPO."""

    pair: PairItem
    chosen: float
    rejected: float

    @property
    def right(self) -> bool:
        return self.chosen > self.rejected


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
