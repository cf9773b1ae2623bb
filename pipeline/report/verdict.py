"""Decide whether RLHF improved the model, in one run or over several seeds: the headline of the report, with its
evidence and uncertainty.

If there is a gold score, it decides, because it was never used for training. The score of a reward model alone decides
nothing, because PPO was trained on it. The score of a reward function shows whether answers improved by its own
criteria. The verdict is "helped" only if it holds at each temperature of the evaluation. Intervals of one run are over
its held-out prompts. They do not cover other training seeds, and the text of the report states this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.stages import STAGES
from pipeline.evaluation.samples import BEST_OF
from pipeline.report.axes import format_interval, format_number, format_signed
from pipeline.report.changes import FEWEST_PROMPTS, Change, Measure, Outcome, change_over, shared_temperatures
from pipeline.report.data import RunReading, read_run
from pipeline.report.win_rate import MOST_UNUSABLE, WinRate, describe_wins, pool_wins

ONE_RUN = (
    "The intervals cover the choice of held-out prompts, but not other training seeds. Compare several seeds before "
    "relying on a small difference."
)
SEVERAL_RUNS = (
    "The 95% intervals cover other seeds and other prompts: both are random samples of the model y = mean + seed + "
    "prompt + error (Searle, Casella & McCulloch, 1992)."
)
BIAS = "which biases the result upwards."
SELECTED = "The same prompts selected the model, so a gain is not proven."
TOO_FEW = (
    f"There are too few prompts for a verdict: at least {FEWEST_PROMPTS} are needed. Raise evaluation.prompts, or "
    "data.eval_fraction if the data have fewer held-out prompts."
)
NO_GOLD = (
    "data has no gold score to judge by: read the answers to see whether they are better, or set evaluation.judge to a "
    "function that grades them."
)
TRAINED_FUNCTION = (
    "PPO was trained on this function with other prompts. Read the answers to judge what the function does not check."
)
SCORE = {
    "reward model": "The reward score",
    "reward function": "The reward function's score",
    "reward": "The sum of reward model and reward function",
    "teacher": "The log-ratio of teacher and student",
}
MOVED: dict[Outcome, str] = {"good": "rose", "bad": "fell", "open": "did not clearly change"}


@dataclass(frozen=True)
class Verdict:
    """The headline of the report, its outcome, its evidence, and the limits of the evidence.

    A headline about one temperature is a clause without a full stop and without the temperature. `advice` is evidence
    that does not depend on the temperature.
    """

    outcome: Outcome
    headline: str
    evidence: str
    caveat: str = ""
    advice: str = ""


def judge(run: RunReading) -> Verdict:
    """Return the verdict on `run`, which may be unfinished."""
    policy = run.stage(run.policy)
    if not policy.finished:
        return _unfinished(run)
    verdict = _judge([run]) or Verdict("open", f"{_method(run)} has finished.", f"This {NO_GOLD}")
    step, guard, start = policy.number("exported_step"), policy.guard, run.labels["sft"]
    if step == 0 and policy.name != "dpo":  # all differences are 0
        reason = "ppo.export=best" if guard.get("stopped_step") is None else "The guard"
        text = f"{reason} selected no rollout: the exported model is the unchanged {start} model."
        verdict = replace(verdict, evidence=text)
    if run.trained_again:
        earlier = f"{policy.name.upper()} started from earlier models of {' and '.join(run.trained_again)}"
        verdict = replace(
            verdict, evidence=f"{verdict.evidence}\n{earlier}: run stage={policy.name} to train it again."
        )
    if is_selected(run):
        selects_by = guard.get("selects_by", "score")
        verdict = _not_proven(
            verdict,
            SELECTED,
            f"The model of rollout {step:.0f} was selected by its {selects_by} on these prompts, {BIAS}",
        )
    return _guarded(verdict, guard, step, start)


def judge_seeds(runs: Sequence[RunReading], failed: Sequence[str] = ()) -> Verdict:
    """Return the verdict over all seeds: "helped" only if the interval over seeds excludes 0 at each temperature.

    The verdict is never good if runs failed: the seeds of the other runs are no random sample.
    """
    verdict = _judge(runs)
    if verdict is None:
        return Verdict("open", f"{len(runs)} runs have finished.", "They have no graded held-out answers in common.")
    selected = [run.name for run in runs if is_selected(run)]
    if selected:
        chosen = f"The models of {len(selected)} of {len(runs)} runs ({', '.join(selected)}) were selected"
        verdict = _not_proven(verdict, SELECTED, f"{chosen} by their scores on these prompts, {BIAS}")
    if failed:
        count = f"{len(failed)} of {len(runs) + len(failed)} runs failed, so a gain over all seeds is not proven."
        verdict = _not_proven(verdict, count, f"Not included, because they failed: {', '.join(failed)}.")
    signs = {run.name: text for run in runs if (text := guard_signs(run.stage(run.policy).guard))}
    if not signs:
        return verdict
    found_signs = "; ".join(f"{name} {text}" for name, text in signs.items())
    return replace(
        verdict,
        headline=f"Training went wrong in {len(signs)} of {len(runs)} runs ({', '.join(signs)}).",
        evidence=f"Signs of the training guard: {found_signs}.\n{verdict.evidence}",
        outcome=_never_good(verdict.outcome),
    )


def _never_good(outcome: Outcome) -> Outcome:
    return "open" if outcome == "good" else outcome


def _not_proven(verdict: Verdict, headline: str, evidence: str) -> Verdict:
    """Return a verdict with a reason why a gain is not proven: it is never good."""
    headline, evidence = f"{verdict.headline} {headline}", f"{verdict.evidence}\n{evidence}"
    return replace(verdict, headline=headline, evidence=evidence, outcome=_never_good(verdict.outcome))


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
    evidence = [*(f"Guard: {each['sentence']}." for each in findings), *evidence]
    return Verdict(_never_good(verdict.outcome), headline, "\n".join(evidence), verdict.caveat)


def combine(verdicts: Mapping[float, Verdict]) -> Verdict:
    """Return the verdict over all temperatures: good if it is good at each of them, bad if it is bad at one of them.

    The headlines of `verdicts` have no full stop and no temperature.
    """
    temperatures: dict[str, list[float]] = {}
    for temperature, verdict in verdicts.items():
        temperatures.setdefault(verdict.headline, []).append(temperature)
    headlines = [f"{headline} at {format_temperatures(equal)}." for headline, equal in temperatures.items()]
    evidence = [f"Temperature {temperature:g}: {verdict.evidence}" for temperature, verdict in verdicts.items()]
    evidence += dict.fromkeys(verdict.advice for verdict in verdicts.values() if verdict.advice)
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    outcome: Outcome = "bad" if "bad" in outcomes else "open" if "open" in outcomes else "good"
    caveats = dict.fromkeys(verdict.caveat for verdict in verdicts.values() if verdict.caveat)
    return Verdict(outcome, " ".join(headlines), "\n".join(evidence), " ".join(caveats))


def format_temperatures(temperatures: Sequence[float]) -> str:
    """Return temperatures as text, such as "temperature 1" or "temperatures 1 and 0"."""
    names = [f"{temperature:g}" for temperature in temperatures]
    return f"temperatures {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"temperature {names[0]}"


def _judge(runs: Sequence[RunReading]) -> Verdict | None:
    """Return the verdict on finished runs over all temperatures; None without grades to decide by."""
    verdicts = {at: found for at in shared_temperatures(runs) if (found := _judge_at(runs, at)) is not None}
    return combine(verdicts) if verdicts else None


def _judge_at(runs: Sequence[RunReading], temperature: float) -> Verdict | None:
    """Return the verdict at one temperature; None if the answers at this temperature have no grades to decide by."""

    def changed(measure: Measure, before: str = "sft") -> Change | None:
        return change_over(runs, measure, before, run.policy, temperature)

    run = runs[0]
    start, label = run.labels["sft"], _method(run)
    gold, scores = changed("gold"), changed("scores")
    wins = pool_wins([each.samples(temperature) for each in runs], run.policy)
    if gold is not None:
        verdict = _by_gold(run, gold, scores, changed("gold", BEST_OF), label)
        more = "" if wins is None else f" {describe_wins(wins, label, start)}"
        return replace(verdict, evidence=verdict.evidence + more)
    if wins is not None:
        return _by_pairs(wins, label, start)
    return None if scores is None else _by_scores(run, scores, changed("function"))


def conclusion(run_dir: Path) -> str | None:
    """Return the verdict on a run folder as lines: the headline and the evidence of each temperature.

    Returns None before PPO or DPO has finished.
    """
    run = read_run(run_dir)
    if not run.stage(run.policy).finished:
        return None
    verdict = judge(run)
    return f"{verdict.headline}\n{verdict.evidence}"


def _method(run: RunReading) -> str:
    return "Distillation" if run.rewarder == "teacher" else run.labels[run.policy]


def _scope(seeds: Sequence[object]) -> tuple[str, str]:
    """Return the end of a headline and the caveat of a verdict: over several seeds, or on one run."""
    return (f" over {len(seeds)} seeds", SEVERAL_RUNS) if seeds else ("", ONE_RUN)


def _by_gold(run: RunReading, gold: Change, scores: Change | None, best_of: Change | None, label: str) -> Verdict:
    start, rewarder, (over, caveat) = run.labels["sft"], run.rewarder, _scope(gold.by_seed)
    method = "RLHF" if run.policy == "ppo" and rewarder != "teacher" else label
    evidence = _went(gold, "gold score", (f"{gold.old_mean:.2f}", f"{gold.new_mean:.2f}"), (start, label))
    if scores:
        evidence += f" {SCORE[rewarder]}, which PPO was trained on, changed by {_interval(scores)}."
    if best_of:
        evidence += (
            f" The best of {run.best_of} {start} answers by the {rewarder} has a mean gold score of "
            f"{best_of.old_mean:.2f}; {label} differs from it by {_interval(best_of)}."
        )
    if gold.outcome == "good":
        return Verdict("good", f"{method} helped{over}", evidence, caveat)
    if gold.outcome == "bad":
        gamed = f" (the {rewarder} was gamed)" if scores is not None and scores.outcome == "good" else ""
        return Verdict("bad", f"{method} hurt{gamed}{over}", evidence, caveat)
    if few := _few(gold):
        return Verdict("open", f"No verdict on {label}{over}", evidence, caveat, few)
    reason = "The interval of the gold score's change contains zero."
    return Verdict("open", f"No clear difference between {start} and {label}{over}", evidence, caveat, reason)


def _by_pairs(wins: WinRate, label: str, start: str) -> Verdict:
    """Return the verdict by a pair judge: good only if the judge prefers the model also at equal length."""
    evidence, plain, (over, caveat) = describe_wins(wins, label, start), wins.plain, _scope(wins.by_seed)
    each_run = wins.by_seed or [wins]
    few = min(one.pairs for one in each_run) < FEWEST_PROMPTS
    if few or any(one.unusable > MOST_UNUSABLE * (one.pairs + one.unusable) for one in each_run):
        doubt = (
            TOO_FEW if few else f"The judge gave no verdict for more than {MOST_UNUSABLE:.0%} of the pairs of a run."
        )
        return Verdict("open", f"No verdict of the judge on {label}{over}", evidence, caveat, doubt)
    if plain.high < 0.5:
        return Verdict("bad", f"The judge prefers {start} to {label}{over}", evidence, caveat)
    if plain.low <= 0.5:
        headline = f"The judge sees no clear difference between {start} and {label}{over}"
        return Verdict("open", headline, evidence, caveat)
    if wins.controlled.low > 0.5:
        return Verdict("good", f"The judge prefers {label} to {start}{over}", evidence, caveat)
    reason = "Among answers of equal length the difference is not clear."
    headline = f"The judge prefers {label} to {start}{over}, but not at equal length"
    return Verdict("open", headline, f"{evidence} {reason}", caveat)


def _by_scores(run: RunReading, scores: Change, function: Change | None) -> Verdict:
    """Return the verdict without a judge: good only by the scores of a reward function alone."""
    rewarder, (over, caveat) = run.rewarder, _scope(scores.by_seed)
    by_function, outcome = rewarder == "reward function", scores.outcome
    means = format_number(scores.old_mean), format_number(scores.new_mean)
    evidence = _went(scores, "score", means, (run.labels["sft"], "PPO"))
    if function:
        evidence += f" The reward function's share of the score changed by {_interval(function)}."
    trained = TRAINED_FUNCTION if by_function else f"PPO was trained on this score, and this {NO_GOLD}"
    headline = f"{SCORE[rewarder]} {MOVED[outcome]} with PPO{over}"
    advice = " ".join(filter(None, (_few(scores), trained)))
    return Verdict(outcome if by_function else _never_good(outcome), headline, evidence, caveat, advice)


def _went(found: Change, measure: str, means: tuple[str, str], names: tuple[str, str]) -> str:
    """Return the sentences that a measure went from one mean to another one, after the stages with these names."""
    seeds, prompts = len(found.by_seed), f"{found.prompts} held-out prompts" if found.prompts > 1 else "held-out prompt"
    opening = f"Over {seeds} seeds" if seeds else f"On the same {prompts}"
    old, new = (f"{mean} after {name}" for mean, name in zip(means, names, strict=True))
    spread = (
        f" It rose in {found.risen} seeds. The standard deviation of this change is {found.seed_deviation:.2f} between "
        f"seeds and {found.prompt_deviation:.2f} between prompts."
    )
    return f"{opening} the mean {measure} went from {old} to {new}: {_interval(found)}.{spread if seeds else ''}"


def _few(one: Change) -> str:
    return TOO_FEW if one.prompts < FEWEST_PROMPTS else ""


def _unfinished(run: RunReading) -> Verdict:
    states = [
        f"{STAGES[name].title} {'has finished' if stage.finished else f'is unfinished, at step {stage.last_step}'}."
        for name, stage in run.stages.items()
        if stage.started
    ]
    advice = "Run the same command again to resume, or with stage=all for the other stages. It writes this page again."
    word = "finished" if run.stage(run.policy).started else "run"
    return Verdict("open", f"No verdict yet: {STAGES[run.policy].title} has not {word}.", " ".join([*states, advice]))


def _interval(one: Change) -> str:
    return f"{format_signed(one.mean)}, 95% interval {format_interval(one.low, one.high)}"
