"""Draw the accuracy on held-out pairs, and the report card of the reward model (card.json): calibration, length,
agreement, kinds of answers.

A part without data is left out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.axes import format_interval, format_number, format_signed
from pipeline.report.charts import Interval, interval_chart
from pipeline.report.data import StageReading
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
    if not card:
        return None
    charts = grid([_calibration_chart(card["calibration"]), _length_chart(card["margin_by_length"])])
    parts = [charts, _agreement(card), _kinds(card)]
    return element("div", element("h3", "Report card"), parts) if any(parts) else None


def accuracy_chart(stage: StageReading) -> Markup | None:
    """Draw the held-out pair accuracy of a stage: overall, by data source, and by which answer is longer.

    The card has the interval of each share. The summary of DPO has one of all pairs.
    """
    shares = stage.card.get("accuracy") or _summary_shares(stage)
    named = [(label, shares[key]) for key, label in SHARES.items()]
    named[1:1] = [(f"source {name}", value) for name, value in shares["by_source"].items()]
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
    by_source = stage.summary.get("eval_accuracy_by_source") or {}
    return {
        "all": {"share": stage.number("eval_accuracy"), **ends},
        "by_source": {name: {"share": value} for name, value in by_source.items()},
        **{name: {"share": stage.number(f"eval_accuracy_{name}")} for name in ("chosen_longer", "rejected_longer")},
    }


def _calibration_chart(found: Mapping[str, Any] | None) -> Markup | None:
    if found is None:
        return None
    rows = [_share_row(f"{each['confidence']:.0%} sure", each) for each in found["bins"]]
    return interval_chart(
        "Calibration",
        [row for row in rows if row],
        x_name="share of right pairs, 95% interval",
        note="The confidence is sigmoid(margin). A calibrated model is right as often as its confidence states. "
        f"Expected calibration error: {found['error']:.3f}.",
        bounds=(None, 1),
    )


def _length_chart(groups: Sequence[Mapping[str, Any]]) -> Markup | None:
    return interval_chart(
        "Margin by difference in length",
        [
            Interval(
                f"{format_signed(each['extra_tokens'], 1)} tokens", each["margin"], each["low"], each["high"], "plain"
            )
            for each in groups
            if each["low"] is not None
        ],
        x_name="margin, 95% interval",
        note="Mean length of the chosen answer minus that of the rejected answer. A margin that grows with this "
        "difference means that the model prefers length.",
    )


def _agreement(card: Mapping[str, Any]) -> Markup | None:
    found, sampled = card["judge"], card["temperatures"]
    if found is None or found["rank_correlation"] is None:
        return None
    interval = format_interval(found["rank_correlation_low"], found["rank_correlation_high"])
    text = (
        f"Agreement with the judge: over {found['answers']} answers of the SFT model at "
        f"{format_temperatures(sampled[:1])}, score and gold score have the rank correlation "
        f"{found['rank_correlation']:.2f}, 95% interval {interval}."
    )
    pairs = found["same_prompt"]
    if pairs is not None:
        text += (
            f" Of {pairs['count']} pairs of answers to the same prompt at {format_temperatures(sampled)} with "
            f"different gold scores, the model ranks {pairs['share']:.0%} as the judge does ({pairs['low']:.0%} to "
            f"{pairs['high']:.0%})."
        )
    return element("p", text)


def _kinds(card: Mapping[str, Any]) -> Markup | None:
    rows = []
    for kind, label in KINDS.items():
        found = card["scores"][kind]
        if found is None:
            continue
        above, compared = found.get("above_complete"), ""
        if above is not None:
            penalty = f" after a penalty of {format_number(found['penalty'])}" if found["penalty"] else ""
            compared = f"{above['share']:.0%} ({above['low']:.0%} to {above['high']:.0%}){penalty}"
        named = f"{label}, {format_temperatures(card['temperatures'])}" if kind in SAMPLED else label
        means = format_number(found["mean"]), format_number(found["std"])
        rows.append((named, f"{found['count']}", *means, compared))
    if not rows:
        return None
    head = ("Kind of answer", "Answers", "Mean score", "SD", "Scores above the complete answer")
    return table(head, rows, numbers=range(1, 5))


def _share_row(label: str, found: Mapping[str, Any] | None) -> Interval | None:
    if found is None or found["share"] is None:
        return None
    low, high = (math.nan if found.get(end) is None else found[end] for end in ("low", "high"))
    return Interval(label, found["share"], low, high, "plain")
