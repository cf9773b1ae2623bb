"""The training guard: watch the metrics of PPO, and warn, stop or roll back where training has gone wrong.

`step3_ppo/guard_rules.py` decides what has gone wrong. This file collects the numbers for the rules and applies their
findings:

    warn        print each finding once, and continue
    stop        end the stage, and export the best step
    rollback    start again from the best step with a smaller learning rate, at most `MOST_ROLLBACKS` times; then stop

The best step is the step with the highest gold score, in the mean over the temperatures of evaluation. Without a judge
it is the step with the highest held-out reward among the steps whose KL is within a budget. This choice is weaker,
because PPO is trained on this reward.

The history is part of the checkpoint, so that a resumed run has the same findings.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine import distributed
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import GuardAction
from pipeline.evaluation.evaluator import Evaluation, Evaluations
from pipeline.evaluation.intervals import paired_difference
from pipeline.stages.restart import Rollback, read_rollbacks, roll_back
from pipeline.stages.stage_run import StageRun
from step3_ppo.guard_rules import (
    WINDOW,
    Finding,
    check_evaluation,
    check_rollouts,
    fall_at_the_end,
    judge_correlation,
)

MOST_ROLLBACKS = 2
WATCHED = (
    "kl",
    "approx_kl",
    "clip_fraction",
    "entropy",
    "response_length",
    "length_correlation",
    "eos_rate",
    "explained_variance",
)


@dataclass
class Guard:
    """The history of a stage, and the findings so far.

    action: the reaction to a finding
    has_judge: whether a judge grades the held-out answers
    kl_budget: without a judge, the largest KL of a step that may be the best, in nats per answer
    rollbacks: the earlier rollbacks of the stage
    watched: the metrics of a rollout that the rules may use
    rows: the watched metrics of the first rollout (with later ones for those that it lacks) and of the last ones
    evaluations: those of all evaluated steps, without the answers; step 0 is the SFT model
    best_step: the best evaluated step, with which later ones are compared
    found: the findings as {"step", "sign", "sentence"}, the first of each sign
    stopped_step: the step at which the guard stopped the stage
    """

    action: GuardAction
    has_judge: bool
    kl_budget: float
    rollbacks: Sequence[Rollback] = ()
    watched: Sequence[str] = WATCHED
    rows: list[dict[str, float]] = field(default_factory=list)
    evaluations: dict[int, dict[float, Evaluation]] = field(default_factory=dict)
    best_step: int | None = None
    found: list[dict[str, Any]] = field(default_factory=list)
    stopped_step: int | None = None

    @property
    def best_metric(self) -> str:
        """The metric whose highest value selects the best step."""
        return f"mean_{self._grade}"

    @property
    def _grade(self) -> str:
        return "gold_score" if self.has_judge else "eval_score"

    def selection(self, evaluations: Evaluations) -> dict[str, float]:
        """Return `best_metric`: the mean over the temperatures, so that no temperature pays for another."""
        grades = [each.metrics[self._grade] for each in evaluations.values() if self._grade in each.metrics]
        return {self.best_metric: statistics.fmean(grades)} if grades else {}

    def state(self) -> dict[str, Any]:
        """Return the history for a checkpoint, as JSON."""
        evaluations = [
            [step, temperature, graded.scores, graded.gold]
            for step, by_temperature in self.evaluations.items()
            for temperature, graded in by_temperature.items()
        ]
        return {
            "rows": self.rows,
            "evaluations": evaluations,
            "best_step": self.best_step,
            "found": self.found,
            "stopped_step": self.stopped_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the history from a checkpoint."""
        self.rows, self.found = state["rows"], state["found"]
        self.stopped_step, self.best_step = state["stopped_step"], state["best_step"]
        self.evaluations = {}
        for step, temperature, scores, gold in state["evaluations"]:
            self.evaluations.setdefault(step, {})[temperature] = Evaluation([], scores, gold)

    def watch(self, step: int, metrics: Mapping[str, float], answers: int) -> list[Finding]:
        """Add the metrics of a rollout with this number of answers, and return the findings."""
        row = {name: metrics[name] for name in self.watched if name in metrics} | {"step": step, "answers": answers}
        earlier = [each for each in self.rows if each["step"] < step]
        first = [{**row, **each} for each in earlier[:1]]  # without actor steps (critic_warmup) it lacks some metrics
        self.rows = [*first, *earlier[1:][-WINDOW:], row]
        return [] if self.action == "off" else check_rollouts(self.rows)

    def watch_evaluation(self, step: int, evaluations: Evaluations, *, is_last: bool) -> list[Finding]:
        """Return the findings about the evaluation of a step. Later evaluations are compared with it.

        `is_last` says whether it is the evaluation of the last step.
        """
        self.evaluations.pop(step, None)  # a stage that resumes at step 0 evaluates the SFT model again
        self.evaluations[step] = {at: Evaluation([], each.scores, each.gold) for at, each in evaluations.items()}
        if self.action == "off":
            return []
        findings = check_evaluation(self.evaluations, self.best_step)
        return self._compare_with_the_best() if is_last and not findings else findings

    def _compare_with_the_best(self) -> list[Finding]:
        """Return the finding about the last step if it is below the best step, which would be exported instead."""
        kind = "gold" if self.has_judge else "scores"
        means = {step: _mean_of_temperatures(grades, kind) for step, grades in self.evaluations.items()}
        history = [(step, grades) for step, grades in means.items() if grades is not None]
        if self.best_step is None or max(history, key=lambda each: statistics.fmean(each[1]))[0] != self.best_step:
            return []  # without a judge, a step with a higher reward may be outside of the KL budget
        last = next(reversed(self.evaluations.values()))
        before, now = (_mean_of_temperatures(each, "scores") for each in (self.evaluations[self.best_step], last))
        reward = None if before is None or now is None else paired_difference(before, now)
        finding = fall_at_the_end(history, reward, judged=self.has_judge)
        return [] if finding is None else [finding]

    def may_be_best(self, metrics: Mapping[str, float], findings: Sequence[Finding]) -> bool:
        """Return whether the current step may be the best.

        The gold score decides alone. A reward counts only without findings and with a KL within the budget.
        """
        return self.has_judge or (not findings and metrics.get("kl", 0.0) <= self.kl_budget)

    def report(self, step: int, findings: Sequence[Finding]) -> str:
        """Record the findings and return one line for the log: new signs, and a rollback to the step before."""
        known = {each["sign"] for each in self.found}
        new = [finding for finding in findings if finding.sign not in known]
        self.found += [{"step": step, "sign": each.sign, "sentence": each.sentence} for each in new]
        parts = [each.sentence for each in new]
        if self.rollbacks and self.rollbacks[-1].to == step - 1:
            parts.insert(0, f"rolled back from step {self.rollbacks[-1].step}, because {self.rollbacks[-1].reason}")
        return f"guard: {'; '.join(parts)}" if parts else ""

    def act(self, stage: StageRun, step: int, findings: Sequence[Finding]) -> None:
        """Stop the stage after this step, or raise RestartStage to roll back, if the findings require it."""
        if not findings or self.action not in ("stop", "rollback"):
            return
        best, may_return = stage.best_step, self.action == "rollback" and len(self.rollbacks) < MOST_ROLLBACKS
        if may_return and best is not None and best < step and all(finding.lr_helps for finding in findings):
            reason = "; ".join(finding.sentence for finding in findings)
            raise roll_back(stage.folder, stage.checkpoints, Rollback(step, best, reason))
        self.stopped_step = stage.last_step = step
        if distributed.is_rank_zero():
            exported = step if best is None else best
            print(
                f"ppo: the training guard stops the stage after step {step} of {stage.steps} and exports step "
                f"{exported} (0 is the SFT model; with ppo.eval_every=N, more steps can be the best). Change the key "
                "that the sign names, and run again; ppo.guard=warn only prints the sign",
                flush=True,
            )

    def summary(self) -> dict[str, Any]:
        """Return what the guard saw, for summary.json."""
        selects_by = "gold score" if self.has_judge else "reward within the KL budget"
        return {
            "action": self.action,
            "findings": self.found,
            "stopped_step": self.stopped_step,
            "rollbacks": [asdict(each) for each in self.rollbacks],
            "selects_by": None if self.best_step is None else selects_by,
        }


def open_guard(config: RunConfig, folder: Path, *, has_judge: bool) -> Guard:
    """Return the guard of a stage, and print how it selects the best step if that is weak."""
    ppo = config.ppo
    if not has_judge and ppo.selects_best and distributed.is_rank_zero():
        print(
            "ppo: without evaluation.judge, the held-out reward selects the best step. This choice is weak, because "
            "PPO is trained on this reward: set evaluation.judge=FILE.py:NAME",
            flush=True,
        )
    # The small clip range of ratios per answer (GSPO) clips a large share of the tokens also in normal runs.
    # The KL to a teacher starts high: it measures what the student has to learn.
    unwatched = {"clip_fraction"} if ppo.ratio == "sequence" else set()
    unwatched |= {"kl"} if ppo.advantage == "distill" else set()
    watched = [name for name in WATCHED if name not in unwatched]
    watched += [] if ppo.reward_model else ["score", "score_std"]  # a reward model can be gamed more easily
    rollbacks = distributed.broadcast_object(read_rollbacks(folder))
    return Guard(ppo.guard, has_judge, ppo.kl_budget, rollbacks, watched)


def evaluation_metrics(evaluations: Evaluations) -> dict[str, float]:
    """Return the rank correlation of reward and judge of an evaluation, by the names of metrics.jsonl."""
    found = {}
    for number, (temperature, evaluation) in enumerate(evaluations.items()):
        correlation = judge_correlation(evaluation)
        if correlation is not None:
            found["judge_correlation" if number == 0 else f"judge_correlation_at_{temperature:g}"] = correlation
    return found


def _mean_of_temperatures(by_temperature: Evaluations, kind: str) -> list[float] | None:
    """Return one grade per prompt, the mean over the temperatures; None without grades of this kind."""
    columns = [values for each in by_temperature.values() if (values := getattr(each, kind)) is not None]
    return [statistics.fmean(grades) for grades in zip(*columns, strict=True)] if columns else None
