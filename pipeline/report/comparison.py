"""Build the report sections that compare models: verdict, gold score against reward score, and answers."""

import statistics
from collections.abc import Sequence
from itertools import islice

from pipeline.config.stages import POLICIES
from pipeline.data.records import Message
from pipeline.evaluation.rank_correlation import rank_correlation
from pipeline.evaluation.samples import BEST_OF, Sample
from pipeline.report.axes import MINUS, format_interval, format_signed
from pipeline.report.charts import interval_chart, meter, path_chart, scatter_chart
from pipeline.report.curves import line_chart
from pipeline.report.data import RunReading
from pipeline.report.gaming import gaming
from pipeline.report.html import Child, Markup, element, grid, section, table
from pipeline.report.svg import Series
from pipeline.report.verdict import LABELS, Change, Measure, change, judge, standings

LONGEST_TEXT = 4000
DEFAULT_ROWS = 16
DEFAULT_NOISE = 0.03
SCORED = {
    "reward model": "By the reward model that PPO was trained on. It has no fixed scale.",
    "reward function": "By the reward function that PPO was trained on.",
    "reward": "The sum of reward model and reward function, which PPO was trained on. It has no fixed scale.",
}


def measures(run: RunReading) -> tuple[tuple[Measure, str, str], ...]:
    """Return the measures of answers as (measure, title, note)."""
    judge = run.judge or "the program that checks answers"
    return (
        ("gold", "Gold score", f"By {judge}, which is not used for training. From 0 to 1."),
        ("scores", "Reward score", SCORED[run.rewarder]),
        ("function", "Reward function", "The reward function's share of the reward score."),
    )


def verdict_header(run: RunReading, facts: Markup) -> Markup:
    """Build the top of the page: the verdict, its evidence, and the scores of the models."""
    verdict = judge(run)
    summary = element(
        "div",
        element("p", "zerochat run report", class_="kicker"),
        element("h1", verdict.headline, class_=f"outcome-{verdict.outcome}"),
        [element("p", line, class_="evidence") for line in verdict.evidence.splitlines()],
        element("p", verdict.caveat, class_="caveat") if verdict.caveat else None,
        facts,
    )
    charts = [
        interval_chart(
            f"{title} at temperature {temperature:g}",
            standings(run.samples(temperature), measure),
            x_name="mean and 95% interval",
            note=note,
            bounds=(0, 1) if measure == "gold" else (None, None),
        )
        for measure, title, note in measures(run)
        for temperature in run.temperatures
    ]
    shown = [chart for chart in charts if chart]
    return element("header", summary, element("div", shown, class_="scores") if shown else None)


def changes_section(run: RunReading) -> Markup | None:
    """Build the table of paired changes between models. Return None without scores."""
    rows = [
        (f"{LABELS[before]} to {LABELS[after]}", title, f"{temperature:g}", *_change_cells(found, measure))
        for measure, title, _ in measures(run)
        for before, after in (("base", "sft"), *(("sft", policy) for policy in POLICIES), (BEST_OF, "ppo"))
        for temperature in run.temperatures
        if (found := change(run.samples(temperature), measure, before, after))
    ]
    if not rows:
        return None
    head = ("Change", "Measure", "Temperature", "Mean difference", "95% interval", "Prompts better", "same", "worse")
    lead = (
        f"The same {_prompts(run)} held-out prompts, answered by each model with the same sampling noise. "
        "Differences are paired by prompt, so they can be clear although the intervals of the models overlap."
    )
    changes = table(head, rows, numbers=range(2, 8))
    return section("changes", "What each stage changed", lead, changes)


def _prompts(run: RunReading) -> int:
    return len(run.samples(run.temperatures[0]))


def _change_cells(found: Change, measure: Measure) -> tuple[Child, ...]:
    # A higher reward score alone is no success, so only gold is coloured.
    outcome = found.outcome if measure == "gold" else "open"
    interval = "one prompt only" if found.prompts < 2 else format_interval(found.low, found.high)
    mean = element("strong", format_signed(found.mean), class_=f"outcome-{outcome}")
    return mean, interval, found.better, found.same, found.worse


def gaming_section(run: RunReading) -> Markup | None:
    """Build the section that compares gold score and reward score over PPO. Return None unless both exist.

    The section is about the first temperature of the evaluation, by default that of the rollouts.
    """
    ppo, samples = run.stage("ppo"), _first_samples(run)
    at = f" At temperature {run.temperatures[0]:g}." if run.temperatures else ""
    reward, gold = dict(ppo.series("eval_score")), ppo.series("gold_score")
    path = [(step, reward[step], value) for step, value in gold if step in reward]
    judged = [
        Series(LABELS[model], [(sample.scores[model], sample.gold[model]) for sample in _scored(samples, model)], model)
        for model in ("sft", "ppo")
    ]
    if not path and not any(group.points for group in judged):
        return None
    paired = change(samples, "gold", "sft", "ppo")
    helped = paired is not None and paired.outcome == "good"
    found = gaming(path, _noise(samples), run.rewarder, helped=helped)
    figures = (
        path_chart(
            "Gold against reward over PPO",
            path,
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
            "Answer by answer",
            judged,
            x_name="reward score",
            y_name="gold score",
            note=f"{_correlation_note(judged)}{at}",
            y_bounds=(0, 1),
        ),
    )
    lead = [element("strong", found.answer, class_=f"outcome-{found.outcome}"), " ", found.reason]
    return section("gaming", f"Is the {run.rewarder} being gamed?", lead, grid(chart for chart in figures if chart))


def _first_samples(run: RunReading) -> Sequence[Sample]:
    """Return the held-out answers at the first temperature."""
    return run.samples(run.temperatures[0]) if run.temperatures else ()


def _scored(samples: Sequence[Sample], model: str) -> list[Sample]:
    return [sample for sample in samples if model in sample.scores and model in sample.gold]


def _noise(samples: Sequence[Sample]) -> float:
    """Return two standard errors of the mean gold score over the held-out prompts."""
    values = [sample.gold["ppo"] for sample in samples if "ppo" in sample.gold]
    return 2 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else DEFAULT_NOISE


def _correlation_note(groups: Sequence[Series]) -> str:
    correlations = [
        f"{group.label} {correlation:.2f}".replace("-", MINUS)
        for group in groups
        if (correlation := rank_correlation([x for x, _ in group.points], [y for _, y in group.points])) is not None
    ]
    return f"Rank correlation of reward and gold: {', '.join(correlations)}." if correlations else "One dot per answer."


def answers_section(run: RunReading) -> Markup | None:
    """Build the section with the answers of each model to the first held-out prompts, in file order."""
    if not run.temperatures:
        return None
    configured = run.setting("evaluation", "table_rows")
    count = configured if isinstance(configured, int) and configured > 0 else DEFAULT_ROWS
    by_prompt: dict[tuple[Message, ...], list[Sample]] = {}
    for temperature in run.temperatures:
        for sample in run.samples(temperature):
            by_prompt.setdefault(sample.prompt, []).append(sample)
    cards = [_answer_card(samples) for samples in islice(by_prompt.values(), count)]
    lead = f"The first {len(cards)} of {_prompts(run)} held-out prompts, in file order."
    return section("answers", "What the models answer", lead, cards)


def _answer_card(samples: Sequence[Sample]) -> Markup:
    """Build the card of one prompt. `samples` are its answers at each temperature."""
    turns = [
        element("p", element("span", turn.role, class_="role"), element("span", _cut(turn.content), dir="auto"))
        for turn in samples[0].prompt
    ]
    found = dict.fromkeys(model for sample in samples for model in sample.answers)
    order = sorted(found, key=lambda model: list(LABELS).index(model) if model in LABELS else len(LABELS))
    answers = [_answer(sample, model) for model in order for sample in samples if model in sample.answers]
    return element(
        "article", element("div", turns, class_="prompt"), element("div", answers, class_="answers"), class_="card"
    )


def _answer(sample: Sample, model: str) -> Markup:
    tone = model if model in LABELS else "plain"
    figures: list[Child] = []
    if model in sample.gold:
        gold = sample.gold[model]
        figures += [element("span", f"gold {gold:.2f}", class_="score"), meter(gold, tone)]
    if model in sample.scores:
        figures.append(element("span", f"reward {format_signed(sample.scores[model])}", class_="score"))
    answer = sample.answers[model]
    if model in sample.function:
        figures.append(element("span", f"function {format_signed(sample.function[model])}", class_="score"))
    text = element("p", _cut(answer), dir="auto", class_="text") if answer else element("p", "(empty)", class_="empty")
    head = element("h3", f"{LABELS.get(model, model)}, temperature {sample.temperature:g}", class_=f"tone-{tone}")
    return element("div", element("div", head, figures, class_="who"), text, class_="answer")


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT} more characters)"
