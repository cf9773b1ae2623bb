"""Pool the win rates of several runs that differ in their seed: the rates over all seeds, and a table of each seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.evaluation.intervals import mean_interval, mean_over_seeds, shared_prompts
from pipeline.evaluation.samples import Sample
from pipeline.report.html import Child, Markup, section, table
from pipeline.report.verdict import FEWEST_PROMPTS, TOO_FEW, Verdict, verdict_by_pairs
from pipeline.report.win_rate import MOST_UNUSABLE, Rate, WinRate, outcomes_by_prompt, rate_cells, win_rate

LEAD = (
    "A pair judge compares the two answers in both orders. A win needs both orders; ties count half. The "
    "intervals of all seeds also cover other seeds. The length-controlled rate of all seeds is the mean of those of "
    "the seeds, with a t-interval. If the seeds share their prompts, this interval is at least as wide as those of the "
    "seeds."
)


@dataclass(frozen=True)
class SeedWins:
    """The win rates over all seeds, which also cover other seeds, and those of each seed in the order of the runs."""

    plain: Rate
    controlled: Rate
    by_seed: Sequence[WinRate]


def pool_wins(samples_by_seed: Sequence[Sequence[Sample]], model: str) -> SeedWins | None:
    """Return the win rates of `model` against SFT; None unless each of several seeds has two pairs with verdicts."""
    by_seed = [found for samples in samples_by_seed if (found := win_rate(samples, model)) is not None]
    if len(by_seed) < 2 or len(by_seed) < len(samples_by_seed) or min(found.pairs for found in by_seed) < 2:
        return None
    outcomes = [outcomes_by_prompt(samples, model) for samples in samples_by_seed]
    over = mean_over_seeds(outcomes)
    mean, low, high = mean_interval([found.controlled.mean for found in by_seed])
    if shared_prompts(outcomes):  # the spread between these seeds does not show that of other prompts
        low = min(low, fmean(found.controlled.low for found in by_seed))
        high = max(high, fmean(found.controlled.high for found in by_seed))
    return SeedWins(_bounded(over.mean, over.low, over.high), _bounded(mean, low, high), by_seed)


def _bounded(mean: float, low: float, high: float) -> Rate:
    return Rate(mean, max(0.0, low), min(1.0, high))


def describe_pooled(wins: SeedWins, label: str, start: str) -> str:
    """Return the win rates over all seeds as text. `label` and `start` are the names of the two models."""
    plain, controlled = wins.plain, wins.controlled
    return (
        f"Over {len(wins.by_seed)} seeds, the pair judge prefers the answers of {label} to those of {start} in "
        f"{plain.mean:.0%} of the pairs (95% interval {plain.low:.0%} to {plain.high:.0%}), and in "
        f"{controlled.mean:.0%} at equal length ({controlled.low:.0%} to {controlled.high:.0%})."
    )


def judge_wins(wins: SeedWins, label: str, start: str, caveat: str) -> Verdict:
    """Return the verdict of the pair judge over all seeds, see `verdict_by_pairs`."""
    few, doubt = min(found.pairs for found in wins.by_seed) < FEWEST_PROMPTS, ""
    if few or any(found.unusable > MOST_UNUSABLE * (found.pairs + found.unusable) for found in wins.by_seed):
        doubt = TOO_FEW if few else f"In a seed, more than {MOST_UNUSABLE:.0%} of the pairs have no verdict."
    evidence, runs = describe_pooled(wins, label, start), f" over {len(wins.by_seed)} seeds"
    return verdict_by_pairs(wins.plain, wins.controlled, label, start, evidence, doubt=doubt, runs=runs, caveat=caveat)


def wins_section(wins_by_temperature: dict[float, SeedWins], seeds: Sequence[object], title: str) -> Markup | None:
    """Build the table of win rates: one row per seed, and one over all seeds. Return None without verdicts."""
    rows: list[tuple[Child, ...]] = []
    for temperature, wins in wins_by_temperature.items():
        for seed, one in zip(seeds, wins.by_seed, strict=True):
            counts = (one.wins, one.ties, one.losses, one.unusable)
            rows.append((f"seed {seed}", f"{temperature:g}", *rate_cells(one.plain, one.controlled), *counts))
        totals = (sum(getattr(one, kind) for one in wins.by_seed) for kind in ("wins", "ties", "losses", "unusable"))
        rows.append(("all seeds", f"{temperature:g}", *rate_cells(wins.plain, wins.controlled), *totals))
    head = ("Seed", "Temperature", "Win rate", "Length-controlled", "Wins", "Ties", "Losses", "Unusable")
    if not rows:
        return None
    return section("wins", title, LEAD, table(head, rows, numbers=range(1, 8)))
