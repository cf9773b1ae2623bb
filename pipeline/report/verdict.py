"""Decide whether RLHF improved the model: the headline of the report, with its evidence and uncertainty.

If there is a gold score, it decides, because it was never used for training. The score of a reward model alone decides
nothing, because PPO was trained on it. The score of a reward function shows whether answers improved by its own
criteria. The verdict is "helped" only if it holds at each temperature of the evaluation. Intervals are over the
held-out prompts of one run. They do not cover other training seeds, and the text of the report states this.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.config.stages import STAGES
from pipeline.evaluation.intervals import grade_interval, paired_difference
from pipeline.evaluation.samples import BEST_OF, Sample
from pipeline.report.axes import format_interval, format_number, format_signed
from pipeline.report.charts import Interval
from pipeline.report.data import RunReading, StageReading, read_run
from pipeline.report.win_rate import MOST_UNUSABLE, WinRate, describe_wins, win_rate

Measure = Literal["gold", "scores", "function"]
Outcome = Literal["good", "bad", "open"]

ONE_RUN = (
    "The intervals are paired t-intervals over the prompts of this one run. Another training seed would change the "
    "figures too: compare several runs before relying on a small difference."
)
FEWEST_PROMPTS = 8
SELECTED = "The same prompts selected the model, so a gain is not proven."
TOO_FEW = (
    f"There are too few prompts for a verdict: at least {FEWEST_PROMPTS} are needed. Raise evaluation.prompts, or "
    "data.eval_fraction if the data have fewer held-out prompts."
)
NO_GOLD = (
    "data has no gold score to judge by: read the answers to see whether they are better, or set evaluation.judge to a "
    "function that grades them."
)
SCORE = {
    "reward model": "The reward score",
    "reward function": "The reward function's score",
    "reward": "The sum of reward model and reward function",
    "teacher": "The log-ratio of teacher and student",
}
MOVED: dict[Outcome, str] = {"good": "rose", "bad": "fell", "open": "did not clearly change"}


@dataclass(frozen=True)
class Change:
    """The change of a measure between two models on the same prompts. `low` to `high` is its 95% interval."""

    after: str
    old_mean: float
    new_mean: float
    mean: float
    low: float
    high: float
    better: int
    same: int
    worse: int

    @property
    def prompts(self) -> int:
        return self.better + self.same + self.worse

    @property
    def outcome(self) -> Outcome:
        """See `outcome_of`."""
        return outcome_of(self.low, self.high, self.prompts)


def outcome_of(low: float, high: float, prompts: int) -> Outcome:
    """Return "good" or "bad" if the interval of a change excludes zero and there are enough prompts, else "open"."""
    if prompts < FEWEST_PROMPTS or not (low > 0 or high < 0):
        return "open"
    return "good" if low > 0 else "bad"


@dataclass(frozen=True)
class Verdict:
    """The headline of the report, its outcome, its evidence, and the limits of the evidence.

    A headline about one temperature is a clause without a full stop and without the temperature.
    """

    outcome: Outcome
    headline: str
    evidence: str
    caveat: str = ""


def standings(samples: Sequence[Sample], measure: Measure, labels: Mapping[str, str]) -> list[Interval]:
    """Return the mean of each model in `labels` over the prompts that have a value, with its interval."""
    rows = []
    for model, label in labels.items():
        values = [value for sample in samples if (value := getattr(sample, measure).get(model)) is not None]
        if values:
            rows.append(Interval(label, *grade_interval(values), tone=model))
    return rows


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
    mean, low, high = paired_difference(old, new)
    better = sum(b > a for a, b in pairs)
    worse = sum(b < a for a, b in pairs)
    means = sum(old) / len(old), sum(new) / len(new)
    return Change(after, *means, mean, low, high, better, len(pairs) - better - worse, worse)


def judge(run: RunReading) -> Verdict:
    """Return the verdict on `run`, which may be unfinished."""
    policy = run.stage(run.policy)
    if not policy.finished:
        return _unfinished(run)
    verdicts = {at: verdict for at in run.temperatures if (verdict := _judge_at(run, at)) is not None}
    verdict = combine(verdicts) if verdicts else _without_grades(policy)
    step, guard = policy.number("exported_step"), policy.guard
    if is_selected(run):
        selects_by = guard.get("selects_by", "score")
        chosen = (
            f"The model of rollout {step:.0f} was selected by its {selects_by} on these prompts, which biases the "
            "result upwards."
        )
        verdict = not_proven(replace(verdict, evidence=f"{verdict.evidence} {chosen}"))
    return _guarded(verdict, guard, step, run.labels["sft"])


def not_proven(verdict: Verdict) -> Verdict:
    """Return the verdict on a model that was selected on the prompts of the verdict: it is never good."""
    headline = f"{verdict.headline} {SELECTED}"
    return replace(verdict, headline=headline, outcome="open" if verdict.outcome == "good" else verdict.outcome)


def guard_signs(guard: Mapping[str, Any]) -> str:
    """Return the findings in `guard` of a summary as text, such as "at rollout 6 (length)"; "" without findings."""
    findings = guard.get("findings")
    if not findings:
        return ""
    signs, step = ", ".join(each["sign"] for each in findings), findings[0]["step"]
    return f"{f'at rollout {step}' if step else 'before rollout 1'} ({signs})"


def is_selected(run: RunReading) -> bool:
    """Return whether PPO exported a step that it selected by held-out grades. The verdict uses the same prompts."""
    policy = run.stage(run.policy)
    selects = run.setting("ppo", "export") == "best" or policy.guard.get("stopped_step") is not None
    has_grades = policy.guard.get("selects_by", "score") is not None  # earlier summaries do not have the key
    # DPO selects by pairs, and step 0 is the model that the stage starts from.
    return policy.name != "dpo" and selects and has_grades and bool(policy.number("exported_step"))


def _guarded(verdict: Verdict, guard: Mapping[str, Any], exported_step: float | None, start: str) -> Verdict:
    """Return a verdict with the findings and rollbacks of the guard. A run with findings is never called a success."""
    findings, evidence = guard.get("findings"), [verdict.evidence]
    for each in guard.get("rollbacks", []):
        target = f"rollout {each['to']}" if each["to"] else f"the {start} model"
        evidence.append(f"The guard returned from rollout {each['step']} to {target}, because {each['reason']}.")
    if not findings:
        return replace(verdict, evidence="\n".join(evidence))
    headline = f"Training went wrong {guard_signs(guard)}."
    if guard.get("stopped_step") is not None and exported_step is not None:
        model = f"model of rollout {exported_step:.0f}" if exported_step else f"{start} model"
        headline += f" The guard stopped it and exported the {model}."
    sentences = "; ".join(each["sentence"] for each in findings)
    outcome: Outcome = "bad" if verdict.outcome == "bad" else "open"
    return Verdict(outcome, headline, "\n".join([f"Guard: {sentences}.", *evidence]), verdict.caveat)


def combine(verdicts: Mapping[float, Verdict]) -> Verdict:
    """Return the verdict over all temperatures: good if it is good at each of them, bad if it is bad at one of them.

    The headlines of `verdicts` have no full stop and no temperature.
    """
    temperatures: dict[str, list[float]] = {}
    for temperature, verdict in verdicts.items():
        temperatures.setdefault(verdict.headline, []).append(temperature)
    headlines = [f"{headline} at {format_temperatures(equal)}." for headline, equal in temperatures.items()]
    own, shared = _shared_ending([verdict.evidence for verdict in verdicts.values()])
    evidence = [f"Temperature {temperature:g}: {text}" for temperature, text in zip(verdicts, own, strict=True)]
    evidence += [shared] if shared else []
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    outcome: Outcome = "bad" if "bad" in outcomes else "open" if "open" in outcomes else "good"
    caveats = dict.fromkeys(verdict.caveat for verdict in verdicts.values() if verdict.caveat)
    return Verdict(outcome, " ".join(headlines), "\n".join(evidence), " ".join(caveats))


def _shared_ending(texts: Sequence[str]) -> tuple[list[str], str]:
    """Return texts without the last sentences that are equal in all of them, and these sentences as one text."""
    sentences, shared = [re.split(r"(?<=\.) (?=[A-Z])", text) for text in texts], list[str]()
    while len(texts) > 1 and min(map(len, sentences)) > 1 and len({each[-1] for each in sentences}) == 1:
        shared.insert(0, sentences[0][-1])
        sentences = [each[:-1] for each in sentences]
    return [" ".join(each) for each in sentences], " ".join(shared)


def format_temperatures(temperatures: Sequence[float]) -> str:
    """Return temperatures as text, such as "temperature 1" or "temperatures 1 and 0"."""
    names = [f"{temperature:g}" for temperature in temperatures]
    return f"temperatures {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"temperature {names[0]}"


def _judge_at(run: RunReading, temperature: float) -> Verdict | None:
    """Return the verdict at one temperature; None if the answers at this temperature have no grades to decide by."""
    policy, samples = run.stage(run.policy), run.samples(temperature)
    start, label = run.labels["sft"], run.labels[policy.name]
    reward = change(samples, "scores", "sft", policy.name)
    gold, wins = change(samples, "gold", "sft", policy.name), win_rate(samples, policy.name)
    if gold is not None:
        verdict = _by_gold(gold, reward, change(samples, "gold", BEST_OF, policy.name), run)
        return (
            verdict
            if wins is None
            else replace(verdict, evidence=f"{verdict.evidence} {describe_wins(wins, label, start)}")
        )
    if wins is not None:
        return verdict_by_pairs(wins, label, start)
    if policy.name == "dpo" or reward is None:
        return None
    if run.rewarder == "reward function":
        before, after = standings(samples, "scores", {"sft": start, "ppo": "PPO"})
        return _by_function(reward, before, after)
    return _by_reward(reward, change(samples, "function", "sft", "ppo"), run.rewarder, start)


def conclusion(run_dir: Path) -> str | None:
    """Return the verdict on a run folder as lines: the headline and the evidence of each temperature.

    Returns None before PPO or DPO has finished.
    """
    run = read_run(run_dir)
    if not run.stage(run.policy).finished:
        return None
    verdict = judge(run)
    return f"{verdict.headline}\n{verdict.evidence}"


def _by_gold(gold: Change, reward: Change | None, best_of: Change | None, run: RunReading) -> Verdict:
    start, label, rewarder = run.labels["sft"], run.labels[gold.after], run.rewarder
    method = "RLHF" if gold.after == "ppo" else label
    if rewarder == "teacher":
        method = label = "Distillation"
    evidence = (
        f"On the same {gold.prompts} held-out prompts the mean gold score went from {gold.old_mean:.2f} after {start} "
        f"to {gold.new_mean:.2f} after {label}: {_interval(gold)}."
    )
    if reward:
        evidence += f" {SCORE[rewarder]}, which PPO was trained on, changed by {_interval(reward)}."
    if best_of:
        evidence += (
            f" The best of {run.best_of} {start} answers by the {rewarder} has a mean gold score of "
            f"{best_of.old_mean:.2f}; {label} differs from it by {_interval(best_of)}."
        )
    if gold.outcome == "good":
        return Verdict("good", f"{method} helped", evidence, ONE_RUN)
    if gold.outcome == "bad":
        gamed = reward is not None and reward.outcome == "good"
        headline = f"{method} hurt (the {rewarder} was gamed)" if gamed else f"{method} hurt"
        return Verdict("bad", headline, evidence, ONE_RUN)
    few = gold.prompts < FEWEST_PROMPTS
    reason = TOO_FEW if few else "The interval of the change contains zero."
    return Verdict("open", f"No clear difference between {start} and {label}", f"{evidence} {reason}", ONE_RUN)


def verdict_by_pairs(wins: WinRate, label: str, start: str, caveat: str = ONE_RUN) -> Verdict:
    """Return the verdict by a pair judge: good only if the judge prefers the model also at equal length."""
    evidence, plain = describe_wins(wins, label, start), wins.plain
    runs = f" over {len(wins.by_seed)} seeds" if wins.by_seed else ""
    each_run = wins.by_seed or [wins]
    few = min(one.pairs for one in each_run) < FEWEST_PROMPTS
    if few or any(one.unusable > MOST_UNUSABLE * (one.pairs + one.unusable) for one in each_run):
        doubt = (
            TOO_FEW if few else f"The judge gave no verdict for more than {MOST_UNUSABLE:.0%} of the pairs of a run."
        )
        return Verdict("open", f"No verdict of the judge on {label}{runs}", f"{evidence} {doubt}", caveat)
    if plain.high < 0.5:
        return Verdict("bad", f"The judge prefers {start} to {label}{runs}", evidence, caveat)
    if plain.low <= 0.5:
        headline = f"The judge sees no clear difference between {start} and {label}{runs}"
        return Verdict("open", headline, evidence, caveat)
    if wins.controlled.low > 0.5:
        return Verdict("good", f"The judge prefers {label} to {start}{runs}", evidence, caveat)
    reason = "Among answers of equal length the difference is not clear."
    headline = f"The judge prefers {label} to {start}{runs}, but not at equal length"
    return Verdict("open", headline, f"{evidence} {reason}", caveat)


def _by_function(reward: Change, before: Interval, after: Interval) -> Verdict:
    """Return the verdict by the reward function: whether held-out answers score higher after PPO.

    before, after: the mean scores of the model that PPO started from, and of PPO
    """
    means = " to ".join(f"{_mean_of(each)} after {each.label}" for each in (before, after))
    still = "" if reward.better or reward.worse else " No answer's score changed."
    evidence = (
        f"On the same {reward.prompts} held-out prompts the mean went from {means}: "
        f"{_interval(reward)}.{still}{_few(reward)} PPO was trained on this function with other prompts. Read the "
        "answers to judge what the function does not check."
    )
    headline = f"{SCORE['reward function']} {MOVED[reward.outcome]} with PPO"
    return Verdict(reward.outcome, headline, evidence, ONE_RUN)


def _by_reward(reward: Change, function: Change | None, rewarder: str, start: str) -> Verdict:
    part = f" The reward function's share of the score changed by {_interval(function)}." if function else ""
    evidence = (
        f"From {start} to PPO the score changed by {_interval(reward)} on the same {reward.prompts} held-out "
        f"prompts.{part}{_few(reward)} PPO was trained on this score, and this {NO_GOLD}"
    )
    outcome: Outcome = "bad" if reward.outcome == "bad" else "open"
    return Verdict(outcome, f"{SCORE[rewarder]} {MOVED[reward.outcome]} with PPO", evidence, ONE_RUN)


def _without_grades(policy: StageReading) -> Verdict:
    """Return the verdict on a policy without graded answers. Preference accuracy does not show better answers."""
    if policy.name != "dpo":
        return Verdict("open", "PPO has finished.", "This folder has no scored held-out answers.")
    accuracy, pairs = policy.number("eval_accuracy"), policy.number("eval_pairs")
    low, high = policy.number("eval_accuracy_low"), policy.number("eval_accuracy_high")
    interval = "" if low is None or high is None else f" (95% interval {low:.0%} to {high:.0%})"
    ranked = (
        ""
        if accuracy is None
        else f"It ranks {accuracy:.0%} of {pairs:.0f} held-out pairs{interval} as they are labelled. "
    )
    return Verdict("open", "DPO has finished.", f"{ranked}This {NO_GOLD}")


def _few(one: Change) -> str:
    return f" {TOO_FEW}" if one.prompts < FEWEST_PROMPTS else ""


def _unfinished(run: RunReading) -> Verdict:
    finished = [STAGES[name].title for name, stage in run.stages.items() if stage.finished]
    running = [stage for stage in run.stages.values() if stage.started and not stage.finished]
    parts = []
    if finished:
        parts.append(f"Finished: {', '.join(finished)}.")
    parts += [f"{STAGES[stage.name].title} is unfinished, at step {stage.last_step}." for stage in running]
    if not parts:
        parts.append("No stage of this run has logged a step yet.")
    if running or not finished:
        parts.append("Run the same command again to resume; it also writes this page again.")
    else:
        parts.append("Run the same command with stage=all for the other stages; it also writes this page again.")
    word = "finished" if run.stage(run.policy).started else "run"
    return Verdict("open", f"No verdict yet: {STAGES[run.policy].title} has not {word}.", " ".join(parts))


def _mean_of(one: Interval) -> str:
    if math.isnan(one.low):
        return format_number(one.mean)
    return f"{format_number(one.mean)} (95% interval {format_number(one.low)} to {format_number(one.high)})"


def _interval(one: Change) -> str:
    if math.isnan(one.low):
        return format_signed(one.mean)
    return f"{format_signed(one.mean)}, 95% interval {format_interval(one.low, one.high)}"
