"""Build the report sections that compare models: verdict, changes, and answers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from pipeline.config.stages import POLICIES
from pipeline.data.records import Message
from pipeline.evaluation.samples import BEST_OF, Sample
from pipeline.report.axes import format_interval, format_signed
from pipeline.report.changes import Change, Measure, change_over, shared_temperatures, standings
from pipeline.report.charts import histogram_chart, interval_chart
from pipeline.report.data import SHOWN_MODELS, RunReading
from pipeline.report.html import Child, Markup, element, grid, section, table
from pipeline.report.svg import Series
from pipeline.report.verdict import Verdict, judge
from pipeline.report.win_rate import WinRate, win_rate

LONGEST_TEXT = 4000
OPEN_CARDS = 6  # prompts that are shown at once
EXTREMES = 3  # of the best and of the worst answers
MEASURES: dict[Measure, str] = {"gold": "Gold score", "scores": "Reward score", "function": "Reward function"}


def verdict_header(run: RunReading, facts: Markup) -> Markup:
    """Build the top of the page: the verdict, its evidence, and the scores of the models."""
    notes = {
        "gold": f"By {run.judge or 'the program that checks answers'}, which is not used for training. From 0 to 1.",
        "scores": f"By the {run.rewarder} that PPO was trained on. The scores have no fixed scale.",
        "function": "The reward function's share of the reward score.",
    }
    charts = [
        interval_chart(
            f"{title} at temperature {temperature:g}",
            standings(run.samples(temperature), measure, run.labels),
            x_name="mean and 95% interval",
            note=notes[measure],
            bounds=(0, 1) if measure == "gold" else (None, None),
        )
        for measure, title in MEASURES.items()
        for temperature in run.temperatures
    ]
    return page_header("zerochat run report", judge(run), facts, [chart for chart in charts if chart])


def page_header(kind: str, verdict: Verdict, facts: Child, charts: Sequence[Markup]) -> Markup:
    """Build the top of a page: its kind, the verdict with its evidence, facts about the runs, and charts of scores."""
    summary = element(
        "div",
        element("p", kind, class_="kicker"),
        element("h1", verdict.headline, class_=f"outcome-{verdict.outcome}"),
        [element("p", line, class_="evidence") for line in verdict.evidence.splitlines()],
        element("p", verdict.caveat, class_="caveat") if verdict.caveat else None,
        facts,
    )
    return element("header", summary, element("div", charts, class_="scores") if charts else None)


def changes_section(run: RunReading) -> Markup | None:
    """Build the table of paired changes between models. Return None without scores."""
    changes, wins = changes_table([run]), wins_table("Models", _wins(run))
    if changes is None and wins is None:
        return None
    lead = (
        f"Each model answers the same held-out prompts ({_prompts(run)}) with the same sampling noise. "
        "Differences are paired by prompt, so they can be clear although the intervals of the models overlap."
    )
    more = [element("p", WINS_LEAD, class_="lead"), wins] if wins else None
    return section("changes", "What each stage changed", lead, changes, grid(_histograms(run)), more)


def changes_table(runs: Sequence[RunReading]) -> Markup | None:
    """Build the table of paired changes between models, of one run or over several seeds. Return None without rows."""
    labels, is_one = runs[0].labels, len(runs) == 1
    rows = [
        (f"{labels[before]} to {labels[after]}", title, f"{temperature:g}", *_change_cells(found, measure))
        for measure, title in MEASURES.items()
        for before, after in (("base", "sft"), *(("sft", policy) for policy in POLICIES), (BEST_OF, runs[0].policy))
        for temperature in shared_temperatures(runs)
        if (found := change_over(runs, measure, before, after, temperature))
    ]
    spread = ("Prompts better", "same", "worse") if is_one else ("SD, seeds", "SD, prompts", "Seeds that rose")
    head = ("Change", "Measure", "Temperature", "Mean difference", "95% interval", *spread)
    return table(head, rows, numbers=range(2, 8)) if rows else None


def _change_cells(found: Change, measure: Measure) -> tuple[Child, ...]:
    # A higher reward score alone is no success, so only gold is coloured.
    outcome = found.outcome if measure == "gold" else "open"
    interval = format_interval(found.low, found.high)
    mean = element("strong", format_signed(found.mean), class_=f"outcome-{outcome}")
    if found.by_seed:
        return mean, interval, f"{found.seed_deviation:.3f}", f"{found.prompt_deviation:.3f}", found.risen
    return mean, interval, found.better, found.same, found.worse


def _histograms(run: RunReading) -> Iterator[Markup | None]:
    """Yield the histograms of each measure before and after the policy was trained, at each temperature."""
    models = ("sft", run.policy) if run.policy in POLICIES else ("base", "sft")
    for measure, title in MEASURES.items():
        for temperature in run.temperatures:
            samples = run.samples(temperature)
            values = {model: [getattr(sample, measure).get(model, math.nan) for sample in samples] for model in models}
            if any(all(map(math.isnan, found)) for found in values.values()):
                continue  # after DPO, the reward scores of SFT are those of an earlier PPO
            groups = [Series(run.labels[model], [*enumerate(found)], model) for model, found in values.items()]
            yield histogram_chart(
                f"{title}s before and after, temperature {temperature:g}",
                groups,
                x_name=title.lower(),
                note="How many held-out answers have each score.",
            )


WINS_LEAD = (
    "A pair judge compares the two answers in both orders. A win needs both orders; ties count half. "
    "The length-controlled rate is that of answers of equal length, by a logistic regression on the difference in "
    "characters (Dubois et al., 2024). Pairs without a usable verdict are counted and left out."
)


def _wins(run: RunReading) -> Iterator[tuple[str, float, WinRate]]:
    """Yield the win rates against the start model: the models, the temperature, and the rate."""
    for policy in POLICIES:
        for temperature in run.temperatures:
            wins = win_rate(run.samples(temperature), policy)
            if wins is not None:
                yield f"{run.labels[policy]} against {run.labels['sft']}", temperature, wins


def wins_table(name: str, rows: Iterable[tuple[str, float, WinRate]]) -> Markup | None:
    """Build a table of win rates. Return None without rows.

    name: the head of the first column
    rows: the first cell, the temperature, and the win rate
    """
    counts = ("Wins", "Ties", "Losses", "Contradictions", "Unusable")
    head = (name, "Temperature", "Win rate", "Length-controlled", *counts)
    cells: list[tuple[Child, ...]] = [
        (
            first,
            f"{temperature:g}",
            *(f"{rate.mean:.1%} ({rate.low:.1%} to {rate.high:.1%})" for rate in (wins.plain, wins.controlled)),
            *(wins.wins, wins.ties, wins.losses, wins.inconsistent, wins.unusable),
        )
        for first, temperature, wins in rows
    ]
    return table(head, cells, numbers=range(1, 9)) if cells else None


def _prompts(run: RunReading) -> int:
    return len(run.samples(run.temperatures[0]))


def answers_section(run: RunReading) -> Markup | None:
    """Build the section with the answers of each model to the first held-out prompts, in file order."""
    if not run.temperatures:
        return None
    count = run.setting("evaluation", "table_rows")
    by_prompt: dict[tuple[Message, ...], list[Sample]] = {}
    for temperature in run.temperatures:
        for sample in run.samples(temperature):
            by_prompt.setdefault(sample.prompt, []).append(sample)
    cards = [answer_card(samples, run.labels) for samples in islice(by_prompt.values(), count)]
    lead = f"The first {len(cards)} of {_prompts(run)} held-out prompts, in file order."
    more = None
    if len(cards) > OPEN_CARDS:
        more = element("details", element("summary", f"{len(cards) - OPEN_CARDS} more prompts"), cards[OPEN_CARDS:])
    return section("answers", "What the models answer", lead, cards[:OPEN_CARDS], more, _extremes(run))


def _extremes(run: RunReading) -> Markup | None:
    """Build the cards of the best and the worst answers of the trained policy at the first temperature."""
    samples = run.samples(run.temperatures[0])
    policy = run.policy if any(run.policy in sample.answers for sample in samples) else "sft"
    by_measure = {title.lower(): ranked(samples, measure, policy) for measure, title in MEASURES.items()}
    found = next(((title, order) for title, order in by_measure.items() if len(order) >= 2 * EXTREMES), None)
    if found is None:
        return None
    (title, order), labels = found, run.labels
    groups = (("Best", order[:EXTREMES]), ("Worst", order[: -EXTREMES - 1 : -1]))
    return element(
        "div",
        (
            (
                element("h3", f"{word} answers of {labels[policy]} by {title}"),
                [answer_card([each], labels) for each in some],
            )
            for word, some in groups
        ),
    )


def ranked(samples: Sequence[Sample], measure: Measure, model: str) -> list[Sample]:
    """Return the samples with a score of a model, the best first. Equal scores are in file order."""
    scored = [sample for sample in samples if model in getattr(sample, measure)]
    return sorted(scored, key=lambda sample: -getattr(sample, measure)[model])


def answer_card(samples: Sequence[Sample], labels: Mapping[str, str]) -> Markup:
    """Build the card of one prompt, with a row of answers for each temperature.

    `samples` are the answers at each temperature, `labels` the names of the models.
    """
    turns = [
        element("p", element("span", turn.role, class_="role"), element("span", _cut(turn.text), dir="auto"))
        for turn in samples[0].prompt
    ]
    rows = [
        element("div", [_answer(sample, model, labels[model]) for model in SHOWN_MODELS if model in sample.answers],
                class_="answers")
        for sample in samples
    ]  # fmt: skip
    return element("article", element("div", turns, class_="prompt"), rows, class_="card")


def _answer(sample: Sample, model: str, label: str) -> Markup:
    figures: list[Child] = []
    if model in sample.gold:
        figures.append(element("span", f"gold {sample.gold[model]:.2f}", class_="score"))
    if model in sample.scores:
        figures.append(element("span", f"reward {format_signed(sample.scores[model])}", class_="score"))
    answer = sample.answers[model]
    if model in sample.function:
        figures.append(element("span", f"function {format_signed(sample.function[model])}", class_="score"))
    text = element("p", _cut(answer), dir="auto", class_="text") if answer else element("p", "(empty)", class_="empty")
    head = element("h3", f"{label}, temperature {sample.temperature:g}", class_=f"tone-{model}")
    return element("div", element("div", head, figures, class_="who"), text, class_="answer")


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT} more characters)"
