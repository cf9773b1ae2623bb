"""Compute how a measure of held-out answers changed between two models, in one run or over several seeds.

The change is the paired difference between two models on the same prompts. Over several seeds, `mean_over_seeds` of
`pipeline/evaluation/intervals.py` separates its spread between seeds from its spread between prompts.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.evaluation.intervals import grade_interval, mean_over_seeds, paired_difference
from pipeline.evaluation.samples import Sample
from pipeline.report.charts import Interval
from pipeline.report.data import RunReading

Measure = Literal["gold", "scores", "function"]
Outcome = Literal["good", "bad", "open"]
FEWEST_PROMPTS = 8


@dataclass(frozen=True)
class Change:
    """The change of a measure between two models, with its 95% interval from `low` to `high`.

    better, same, worse: the numbers of prompts by the sign of their change
    by_seed: over several seeds, the change of each seed in the order of the runs; the interval then also covers other
        seeds, and the deviations are those of `SeedEffect`
    """

    old_mean: float
    new_mean: float
    mean: float
    low: float
    high: float
    better: int
    same: int
    worse: int
    by_seed: "Sequence[Change]" = ()
    seed_deviation: float = 0.0
    prompt_deviation: float = 0.0

    @property
    def prompts(self) -> int:
        """The number of prompts; over several seeds, that of the seed with the fewest."""
        return min((one.prompts for one in self.by_seed), default=self.better + self.same + self.worse)

    @property
    def risen(self) -> str:
        """How many of the seeds rose, such as "2 of 3"."""
        return f"{sum(one.mean > 0 for one in self.by_seed)} of {len(self.by_seed)}"

    @property
    def outcome(self) -> Outcome:
        """Return "good" or "bad" if the interval excludes zero and there are enough prompts, else "open"."""
        if self.prompts < FEWEST_PROMPTS or not (self.low > 0 or self.high < 0):
            return "open"
        return "good" if self.low > 0 else "bad"


def change(samples: Sequence[Sample], measure: Measure, before: str, after: str) -> Change | None:
    """Return the paired difference between two models; None if no prompt has a value for both."""
    pairs = [
        (values[before], values[after])
        for sample in samples
        if before in (values := getattr(sample, measure)) and after in values
    ]
    if not pairs:
        return None
    old, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    better = sum(b > a for a, b in pairs)
    worse = sum(b < a for a, b in pairs)
    same = len(pairs) - better - worse
    return Change(statistics.fmean(old), statistics.fmean(new), *paired_difference(old, new), better, same, worse)


def change_over(
    runs: Sequence[RunReading], measure: Measure, before: str, after: str, temperature: float
) -> Change | None:
    """Return the change of one run, or over several runs; None unless each of several has two prompts with both."""
    samples = [run.samples(temperature) for run in runs]
    changes = [found for of_run in samples if (found := change(of_run, measure, before, after))]
    if len(changes) < len(runs):
        return None
    if len(runs) == 1:
        return changes[0]
    by_prompt = [
        {
            sample.prompt: values[after] - values[before]
            for sample in of_run
            if before in (values := getattr(sample, measure)) and after in values
        }
        for of_run in samples
    ]
    if min(map(len, by_prompt)) < 2:
        return None
    over = mean_over_seeds(by_prompt)
    return Change(
        statistics.fmean(one.old_mean for one in changes),
        statistics.fmean(one.new_mean for one in changes),
        over.mean,
        over.low,
        over.high,
        sum(one.better for one in changes),
        sum(one.same for one in changes),
        sum(one.worse for one in changes),
        changes,
        over.seed_deviation,
        over.prompt_deviation,
    )


def standings(samples: Sequence[Sample], measure: Measure, labels: Mapping[str, str]) -> list[Interval]:
    """Return the mean of each model in `labels` over the prompts that have a value, with its interval."""
    rows = []
    for model, label in labels.items():
        values = [value for sample in samples if (value := getattr(sample, measure).get(model)) is not None]
        if values:
            rows.append(Interval(label, *grade_interval(values), tone=model))
    return rows


def shared_temperatures(runs: Sequence[RunReading]) -> list[float]:
    """Return the evaluation temperatures that all runs have."""
    return [temperature for temperature in runs[0].temperatures if all(temperature in r.temperatures for r in runs)]
