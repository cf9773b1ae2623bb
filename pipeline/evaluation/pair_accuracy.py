"""Compute the accuracy on held-out preference pairs: overall, by data source, and by which answer is longer."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.encode import PairItem
from pipeline.evaluation.intervals import grouped_share_interval

Card = dict[str, Any]


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
    def extra_tokens(self) -> int:
        """The tokens of the chosen side less those of the rejected side."""
        return len(self.pair.chosen) - len(self.pair.rejected)

    @property
    def group(self) -> Hashable:
        """What pairs of the same conversation have in common. Their outcomes are not independent."""
        return id(self) if self.pair.conversation is None else self.pair.conversation


def share(outcomes: Sequence[bool], groups: Sequence[Hashable]) -> Card | None:
    """Return the share of True with its interval and the number of outcomes. Those of a group are not independent."""
    if not outcomes:
        return None
    low, high = grouped_share_interval(outcomes, groups)
    return {"share": sum(outcomes) / len(outcomes), "low": low, "high": high, "count": len(outcomes)}


def accuracy(scored: Sequence[Scored]) -> Card:
    """Return the share of pairs whose chosen answer scores higher: of all, by source, and by which answer is longer."""
    sources = sorted({each.pair.source for each in scored})

    def of(members: Sequence[Scored]) -> Card | None:
        return share([each.right for each in members], [each.group for each in members])

    return {
        "all": of(scored),
        "by_source": {name: of([each for each in scored if each.pair.source == name]) for name in sources},
        "chosen_longer": of([each for each in scored if each.extra_tokens > 0]),
        "rejected_longer": of([each for each in scored if each.extra_tokens < 0]),
    }


def accuracies(scored: Sequence[Scored]) -> dict[str, float | dict[str, float] | None]:
    """Return the shares of `accuracy` by their names in summary.json. A share of no pairs is None."""
    shares = accuracy(scored)
    fraction = {name: part and part["share"] for name, part in shares.items() if name != "by_source"}
    all_pairs = shares["all"] or {}
    return {
        "eval_accuracy": fraction["all"],
        "eval_accuracy_low": all_pairs.get("low"),
        "eval_accuracy_high": all_pairs.get("high"),
        "eval_accuracy_by_source": {name: part["share"] for name, part in shares["by_source"].items()},
        "eval_accuracy_chosen_longer": fraction["chosen_longer"],
        "eval_accuracy_rejected_longer": fraction["rejected_longer"],
        "eval_pairs": float(len(scored)),
    }
