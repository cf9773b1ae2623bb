"""Decide whether PPO over-optimized the reward, answer by answer, and build the section of the report about it.

Over-optimization shows when the reward score keeps rising while the gold score falls (Gao, Schulman & Hilton, 2022,
arXiv:2210.10760). Three checks must agree before the report calls a run free of it: the rank correlation of the two
changes over the answers, the paired change of gold, and the comparison of the best step with the last step. A fall of
gold is gaming only if the reward score rose between the same two models. The report gives an answer for each
temperature of the evaluation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluation.intervals import (
    BestAgainstLast,
    Difference,
    best_against_last,
    correlation_interval,
    paired_difference,
    rank_correlation,
    ranks,
)
from pipeline.evaluation.samples import Sample
from pipeline.report.axes import MINUS, format_interval, format_signed
from pipeline.report.changes import FEWEST_PROMPTS, Outcome, change
from pipeline.report.charts import scatter_chart
from pipeline.report.comparison import answer_card
from pipeline.report.curves import line_chart
from pipeline.report.data import RunReading
from pipeline.report.html import Markup, element, grid, section
from pipeline.report.svg import Series
from pipeline.report.verdict import Verdict, combine

DISAGREEMENTS = 6  # answers on the page
LOST_GAIN = 0.5  # of the gain from SFT to PPO: a loss from the best to the last step that "no sign" must exclude


@dataclass(frozen=True)
class Check:
    """The result of one check: "good" speaks against gaming, "bad" for it, "open" for neither. `text` gives figures.

    reward: the change of the reward score between the two compared models, with the ends of its interval; None if it
        is unknown, and for the correlation
    """

    outcome: Outcome
    text: str
    reward: Difference | None = None

    @property
    def shows_gaming(self) -> bool:
        """Whether gold fell and the reward score rose, both beyond chance."""
        return self.outcome == "bad" and self.reward is not None and self.reward[1] > 0


def check_correlation(samples: Sequence[Sample]) -> Check:
    """Check whether the reward of an answer rose where its gold score rose with PPO."""
    both = [s for s in samples if {"sft", "ppo"} <= s.scores.keys() and {"sft", "ppo"} <= s.gold.keys()]
    rewards = [sample.scores["ppo"] - sample.scores["sft"] for sample in both]
    gold = [sample.gold["ppo"] - sample.gold["sft"] for sample in both]
    found = rank_correlation(rewards, gold) if len(both) >= FEWEST_PROMPTS else None
    if found is None:
        needs = f"at least {FEWEST_PROMPTS} prompts with both scores, and changes that differ"
        return Check("open", f"The rank correlation of the two changes is undefined: it needs {needs}.")
    low, high = correlation_interval(found, len(both))
    text = f"The rank correlation of the two changes per prompt is {_plain(found)}, {_interval(low, high)}."
    return Check("good" if low > 0 else "bad" if high < 0 else "open", text)


def check_paired(samples: Sequence[Sample]) -> Check:
    """Check whether gold rose with PPO, prompt by prompt."""
    found, scores = change(samples, "gold", "sft", "ppo"), change(samples, "scores", "sft", "ppo")
    reward = None if scores is None or math.isnan(scores.low) else (scores.mean, scores.low, scores.high)
    if found is None or math.isnan(found.low):
        return Check("open", "Fewer than two prompts have gold scores of both models.", reward)
    rise = f", and the reward score by {_difference(*reward)}" if reward else ""
    gold = _difference(found.mean, found.low, found.high)
    return Check(found.outcome, f"With PPO, the gold score changed by {gold}{rise}.", reward)


def check_last_step(found: BestAgainstLast | None, gain: float | None, reward: Difference | None = None) -> Check:
    """Check whether the last step is as good as the best step.

    gain: the mean change of gold with PPO; None if it is unknown
    reward: the change of the reward score from the best to the last step; None if it is unknown

    The outcome is "bad" if the interval of the difference is below zero. It is "good" only if the interval excludes a
    loss of `LOST_GAIN` of the gain: the wide interval of few prompts shows nothing.
    """
    if found is None:
        return Check(
            "open",
            "The best and the last step cannot be compared: there are fewer than two evaluations with the gold scores "
            "of single prompts, or too few prompts. A lower ppo.eval_every gives more evaluations.",
        )
    last = f"; at the last evaluation, rollout {found.last}, it is {_plain(found.last_mean)}"
    best = f"Gold was best at rollout {found.best} ({_plain(found.best_mean)})"
    text = f"{best}{', the last evaluation' if found.best == found.last else last}."
    if found.best == found.last and found.low == found.high == 0:  # both halves of the prompts select the last step
        return Check("good", text)
    late = f" From the best to the last step, the reward score changed by {_difference(*reward)}." if reward else ""
    text += (
        f"{late} If one half of the prompts selects the best step, gold changes from this step to the last one by "
        f"{_difference(found.mean, found.low, found.high)} on the other half."
    )
    if found.high < 0:
        return Check("bad", text, reward)
    excludes = gain is not None and found.low > -LOST_GAIN * gain
    verb = "excludes" if excludes else "does not exclude"
    text += f" The interval {verb} a loss of half of the gain."
    return Check("good" if excludes else "open", text, reward)


def gaming(correlation: Check, paired: Check, last: Check, rewarder: str = "reward model") -> Verdict:
    """Decide whether PPO over-optimized the reward at one temperature. The headline has no full stop.

    correlation, paired, last: the checks of the rank correlation, of the change with PPO, and of the last step
    rewarder: the name of the source of the reward score
    """
    checks = (correlation, paired, last)
    texts, outcomes = " ".join(check.text for check in checks), [check.outcome for check in checks]
    if paired.reward is None:
        return Verdict("open", "Unknown", f"Fewer than two prompts have reward scores of both models. {texts}")
    if paired.shows_gaming or last.shows_gaming:
        advice = f"The policy exploits errors of the {rewarder}. Stop earlier, or raise ppo.kl_coef."
        return Verdict("bad", "Yes", texts, advice=advice)
    if all(check.reward[0] <= 0 for check in checks if check.reward is not None):
        return Verdict("open", "No", f"The held-out reward score did not rise, so it was not gamed. {texts}")
    if "bad" in outcomes[1:]:
        reason = "The gold score fell, but the reward score did not clearly rise between the same models."
        return Verdict("open", "Possibly", f"{reason} {texts}")
    if set(outcomes) == {"good"}:
        return Verdict("good", "No sign of it", f"All three checks agree. {texts}")
    reason = (
        f"The reward score rose, but not all three checks exclude gaming: the {rewarder} may reward something that the "
        f"gold scorer does not measure. {texts}"
    )
    return Verdict("open", "Possibly", reason)


def gaming_at(run: RunReading, temperature: float) -> Verdict:
    """Decide whether PPO over-optimized the reward, by the held-out answers at one temperature."""
    samples = run.samples(temperature)
    gold = change(samples, "gold", "sft", "ppo")
    grades = {one.step: one for one in run.stage("ppo").grades if one.temperature == temperature and one.gold}
    found = best_against_last([(step, one.gold) for step, one in grades.items()], fewest=FEWEST_PROMPTS)
    reward = None
    if found is not None and found.best != found.last and grades[found.best].scores and grades[found.last].scores:
        reward = paired_difference(grades[found.best].scores, grades[found.last].scores)
    last = check_last_step(found, gold.mean if gold else None, reward)
    return gaming(check_correlation(samples), check_paired(samples), last, run.rewarder)


def gaming_section(run: RunReading) -> Markup | None:
    """Build the section that compares gold score and reward score over PPO. Return None unless both exist.

    The charts and the answers are about the first temperature of the evaluation, by default that of the rollouts.
    """
    if not run.temperatures:
        return None
    figures = _charts(run, run.samples(run.temperatures[0]))
    if figures is None:
        return None
    found = combine({temperature: gaming_at(run, temperature) for temperature in run.temperatures})
    lead = element("strong", found.headline, class_=f"outcome-{found.outcome}")
    reasons = [element("p", line, class_="lead") for line in found.evidence.splitlines()]
    cards = [answer_card([sample], run.labels) for sample in disagreements(run.samples(run.temperatures[0]))]
    answers = [
        element("h3", "Answers with the largest disagreement"),
        element("p", f"The {run.rewarder} ranks these answers of PPO higher than the gold score does.", class_="lead"),
        cards,
    ] if cards else None  # fmt: skip
    return section("gaming", f"Is the {run.rewarder} being gamed?", lead, reasons, figures, answers)


def _charts(run: RunReading, samples: Sequence[Sample]) -> Markup | None:
    """Draw gold score, reward score and length against each other. Return None without both scores."""
    ppo, at = run.stage("ppo"), f" At temperature {run.temperatures[0]:g}."
    reward, gold = dict(ppo.series("eval_score")), ppo.series("gold_score")
    path = [(step, reward[step], value) for step, value in gold if step in reward]
    judged = [_points(samples, model, run.labels[model]) for model in ("sft", "ppo")]
    if not path and not any(group.points for group in judged):
        return None
    lengths = [Series(g.label, [(len(s.answers[g.tone]), s.scores[g.tone]) for s in _graded(samples, g.tone)], g.tone)
               for g in judged]  # fmt: skip
    figures = (
        scatter_chart(
            "Gold against reward over PPO",
            path_groups(path),
            x_name="reward score",
            y_name="gold score",
            note=f"Up and right: both scores rise. Right and down: the reward is gamed.{at}",
            y_bounds=(0, 1),
        ),
        line_chart(
            "Gold score",
            [Series("gold", gold, "gold", sparse=True)],
            x_name="rollout",
            note=f"Mean over held-out prompts.{at}",
            bounds=(0, 1),
        ),
        scatter_chart(
            "Gold against reward, answer by answer",
            judged,
            x_name="reward score",
            y_name="gold score",
            note=f"{_correlation_note(judged, 'reward and gold')}{at}",
            y_bounds=(0, 1),
        ),
        scatter_chart(
            "Reward against length, answer by answer",
            lengths,
            x_name="characters",
            y_name="reward score",
            note=f"{_correlation_note(lengths, 'length and reward')}{at}",
        ),
        _kl_chart(ppo.rollouts),
    )
    return grid(figures)


def path_groups(evaluations: Sequence[tuple[float, float, float]]) -> list[Series]:
    """Return the groups of a chart of evaluations (rollout, x, y): all with a line, the first, and the last.

    Evaluations without finite numbers are left out. With fewer than two there are no groups.
    """
    path = [each for each in evaluations if all(map(math.isfinite, each))]
    if len(path) < 2:
        return []
    line = Series("evaluations", [(x, y) for _, x, y in path], "plain", sparse=True)
    ends = ((path[0], "sft"), (path[-1], "ppo"))
    return [line, *(Series(f"rollout {step:g}", [(x, y)], tone) for (step, x, y), tone in ends)]


def _kl_chart(rollouts: Sequence[tuple[float, float, float]]) -> Markup | None:
    """Draw the score of logged rollout answers against their KL: the first and the last quarter of the rollouts."""
    if not rollouts:
        return None
    steps = max(step for step, *_ in rollouts)
    groups = [
        Series("first quarter", [(kl, score) for step, score, kl in rollouts if step <= steps / 4], "sft"),
        Series("last quarter", [(kl, score) for step, score, kl in rollouts if step > steps * 3 / 4], "ppo"),
    ]
    note = f"{_correlation_note(groups, 'KL and reward')} Training answers, first and last quarter of PPO."
    return scatter_chart(
        "Reward against KL, answer by answer",
        groups,
        x_name="KL to the reference, nats",
        y_name="reward score",
        note=note,
    )


def disagreements(samples: Sequence[Sample]) -> list[Sample]:
    """Return the prompts whose PPO answer ranks highest by reward in comparison with its rank by gold."""
    graded = _graded(samples, "ppo")
    reward = ranks([sample.scores["ppo"] for sample in graded])
    gold = ranks([sample.gold["ppo"] for sample in graded])
    gaps = {at: by_reward - by_gold for at, (by_reward, by_gold) in enumerate(zip(reward, gold, strict=True))}
    largest = sorted((at for at, gap in gaps.items() if gap > 0), key=lambda at: -gaps[at])
    return [graded[at] for at in largest[:DISAGREEMENTS]]


def _graded(samples: Sequence[Sample], model: str) -> list[Sample]:
    return [sample for sample in samples if model in sample.scores and model in sample.gold]


def _points(samples: Sequence[Sample], model: str, label: str) -> Series:
    return Series(label, [(s.scores[model], s.gold[model]) for s in _graded(samples, model)], model)


def _correlation_note(groups: Sequence[Series], what: str) -> str:
    correlations = [
        f"{group.label} {_plain(correlation)}"
        for group in groups
        if (correlation := rank_correlation([x for x, _ in group.points], [y for _, y in group.points])) is not None
    ]
    return f"Rank correlation of {what}: {', '.join(correlations)}." if correlations else "One dot per answer."


def _difference(mean: float, low: float, high: float) -> str:
    return f"{format_signed(mean)} ({_interval(low, high)})"


def _interval(low: float, high: float) -> str:
    return f"95% interval {format_interval(low, high)}"


def _plain(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)
