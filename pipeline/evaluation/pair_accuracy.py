"""Compute the accuracy on held-out preference pairs: overall, by data source, and by which answer is longer."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pipeline.data.encode import PairItem
from pipeline.evaluation.intervals import grouped_share_interval


@dataclass(frozen=True)
class Scored:
    """One pair with the scores of its answers: reward-model scores or DPO rewards."""

    pair: PairItem
    chosen: float
    rejected: float

    @property
    def right(self) -> bool:
        return self.chosen > self.rejected

    @property
    def group(self) -> Hashable:
        """What pairs of the same conversation have in common. Their outcomes are not independent."""
        return id(self) if self.pair.conversation is None else self.pair.conversation


def accuracies(scored: Sequence[Scored]) -> dict[str, float | dict[str, float] | None]:
    """Return the fractions of pairs whose chosen answer scores higher. A fraction of no pairs is None.

    `eval_accuracy_low` to `eval_accuracy_high` is the 95% interval of the fraction of all pairs. Conversations are its
    independent units.
    """
    longer = [s for s in scored if len(s.pair.chosen) > len(s.pair.rejected)]
    shorter = [s for s in scored if len(s.pair.chosen) < len(s.pair.rejected)]
    sources = sorted({s.pair.source for s in scored})
    by_source = {name: _accuracy([s for s in scored if s.pair.source == name]) or 0.0 for name in sources}
    right, groups = [s.right for s in scored], [s.group for s in scored]
    low, high = grouped_share_interval(right, groups) if scored else (None, None)
    return {
        "eval_accuracy": _accuracy(scored),
        "eval_accuracy_low": low,
        "eval_accuracy_high": high,
        "eval_accuracy_by_source": by_source,
        "eval_accuracy_chosen_longer": _accuracy(longer),
        "eval_accuracy_rejected_longer": _accuracy(shorter),
        "eval_pairs": float(len(scored)),
    }


def _accuracy(scored: Sequence[Scored]) -> float | None:
    return sum(s.right for s in scored) / len(scored) if scored else None
