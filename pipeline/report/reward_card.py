"""Draw the accuracy on held-out pairs, and the report card of the reward model (card.json): calibration, length,
agreement, kinds of answers.

A part that is missing or malformed is left out.
"""

import math
from collections.abc import Mapping
from typing import Any

from pipeline.report.axes import format_interval, format_number
from pipeline.report.charts import Interval, interval_chart
from pipeline.report.data import StageReading, finite, is_number, mapping
from pipeline.report.html import Markup, element, grid, table
from pipeline.report.verdict import format_temperatures

SHARES = {
    "all": "all pairs",
    "chosen_longer": "chosen is longer",
    "rejected_longer": "rejected is longer",
}
KINDS = {
    "chosen": "chosen answers of held-out pairs",
    "rejected": "rejected answers of held-out pairs",
    "sft": "answers of the SFT model",
    "base": "answers of the base model",
    "unfinished": "chosen answers, cut in half",
    "other_prompt": "chosen answers to another prompt",
}

SAMPLED = ("sft", "base")
"""The kinds of answers that a model generated, at the temperatures of the evaluation."""


def reward_card(card: Mapping[str, Any]) -> Markup | None:
    """Build the part of the reward model's section that shows its report card. Return None without a card."""
    parts = [grid([_calibration_chart(card), _length_chart(card)]), _agreement(card), _kinds(card)]
    return element("div", element("h3", "Report card"), parts) if any(parts) else None


def accuracy_chart(stage: StageReading) -> Markup | None:
    """Draw the held-out pair accuracy of a stage: overall, by data source, and by which answer is longer.

    The card has the interval of each share. The summary of DPO has one of all pairs.
    """
    shares = mapping(stage.card.get("accuracy")) or _summary_shares(stage)
    named = [(label, shares.get(key)) for key, label in SHARES.items()]
    named[1:1] = [(f"source {name}", value) for name, value in mapping(shares.get("by_source")).items()]
    pairs = stage.number("eval_pairs")
    return interval_chart(
        "Held-out accuracy",
        [row for label, value in named if (row := _share_row(label, value))],
        x_name="share of right pairs, 95% interval",
        note=("" if pairs is None else f"{pairs:.0f} pairs. ")
        + "0.5 is a random choice. A much lower share for longer rejected answers means that the model prefers length. "
        "Pairs of equal length are in neither group.",
        bounds=(None, 1),
    )


def _summary_shares(stage: StageReading) -> Mapping[str, Any]:
    """Return the accuracies of summary.json in the form of those of a card."""
    ends = {end: stage.number(f"eval_accuracy_{end}") for end in ("low", "high")}
    return {
        "all": {"share": stage.number("eval_accuracy"), **ends},
        "by_source": {name: {"share": value} for name, value in stage.numbers("eval_accuracy_by_source").items()},
        **{name: {"share": stage.number(f"eval_accuracy_{name}")} for name in ("chosen_longer", "rejected_longer")},
    }


def _calibration_chart(card: Mapping[str, Any]) -> Markup | None:
    found = mapping(card.get("calibration"))
    rows = []
    for each in _list(found.get("bins")):
        confidence = finite(each).get("confidence")
        if confidence is not None and (row := _share_row(f"{confidence:.0%} sure", each)):
            rows.append(row)
    error = finite(found).get("error")
    return interval_chart(
        "Calibration",
        rows,
        x_name="share of right pairs, 95% interval",
        note="The confidence is sigmoid(margin). A calibrated model is right as often as its confidence states."
        + ("" if error is None else f" Expected calibration error: {error:.3f}."),
        bounds=(None, 1),
    )


def _length_chart(card: Mapping[str, Any]) -> Markup | None:
    rows = []
    for each in _list(card.get("margin_by_length")):
        numbers = finite(each)
        if {"extra_tokens", "margin", "low", "high"} <= numbers.keys():
            label = f"{numbers['extra_tokens']:+.1f} tokens"
            rows.append(Interval(label, numbers["margin"], numbers["low"], numbers["high"], "plain"))
    return interval_chart(
        "Margin by difference in length",
        rows,
        x_name="margin, 95% interval",
        note="Mean length of the chosen answer minus that of the rejected answer. A margin that grows with this "
        "difference means that the model prefers length.",
    )


def _agreement(card: Mapping[str, Any]) -> Markup | None:
    found = mapping(card.get("judge"))
    numbers = finite(found)
    if not {"rank_correlation", "rank_correlation_low", "rank_correlation_high", "answers"} <= numbers.keys():
        return None
    interval = format_interval(numbers["rank_correlation_low"], numbers["rank_correlation_high"])
    sampled = _temperatures(card)
    at, all_at = (f" at {format_temperatures(some)}" if some else "" for some in (sampled[:1], sampled))
    text = (
        f"Agreement with the judge: over {numbers['answers']:.0f} answers of the SFT model{at}, score and gold score "
        f"have the rank correlation {numbers['rank_correlation']:.2f}, 95% interval {interval}."
    )
    pairs = finite(found.get("same_prompt"))
    if {"share", "low", "high", "count"} <= pairs.keys():
        text += (
            f" Of {pairs['count']:.0f} pairs of answers to the same prompt{all_at} with different gold scores, the "
            f"model ranks {pairs['share']:.0%} as the judge does ({pairs['low']:.0%} to {pairs['high']:.0%})."
        )
    return element("p", text)


def _kinds(card: Mapping[str, Any]) -> Markup | None:
    rows = []
    sampled = _temperatures(card)
    at = f", {format_temperatures(sampled)}" if sampled else ""
    for kind, label in KINDS.items():
        found = mapping(mapping(card.get("scores")).get(kind))
        numbers, above = finite(found), finite(found.get("above_complete"))
        if not {"mean", "std", "count"} <= numbers.keys():
            continue
        compared = ""
        if {"share", "low", "high"} <= above.keys():
            compared = f"{above['share']:.0%} ({above['low']:.0%} to {above['high']:.0%})"
            penalty = numbers.get("penalty", 0.0)
            compared += f", less {format_number(penalty)}" if penalty else ""
        means = format_number(numbers["mean"]), format_number(numbers["std"])
        named = f"{label}{at if kind in SAMPLED else ''}"
        rows.append((named, f"{numbers['count']:.0f}", *means, compared))
    if not rows:
        return None
    head = ("Kind of answer", "Answers", "Mean score", "SD", "Scores above the complete answer")
    return table(head, rows, numbers=range(1, 5))


def _temperatures(card: Mapping[str, Any]) -> list[float]:
    """Return the temperatures of the answers of SFT model and base model. A card of an earlier version has none."""
    return [value for value in _list(card.get("temperatures")) if is_number(value)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _share_row(label: str, value: Any) -> Interval | None:
    numbers = finite(value)
    if "share" not in numbers:
        return None
    return Interval(label, numbers["share"], numbers.get("low", math.nan), numbers.get("high", math.nan), "plain")
