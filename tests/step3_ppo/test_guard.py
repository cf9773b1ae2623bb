"""The training guard: its history, its reactions, and its state in checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RestartStage
from pipeline.evaluation.evaluator import Evaluation
from pipeline.stages.restart import Rollback, read_rollbacks
from pipeline.stages.stage_run import StageRun
from step3_ppo.guard import Guard, evaluation_metrics, open_guard
from step3_ppo.guard_rules import Finding
from tests.pipeline.stages.test_stage_run import stage_of, work
from tests.tiny import tiny_config

LARGE = Finding("clip fraction", "updates are too large")
CUT = Finding("finished", "answers are cut", lr_helps=False)


def line(step: int, **keys: float) -> dict[str, float]:
    return {
        "kl": 1.0,
        "entropy": 0.5,
        "clip_fraction": 0.1,
        "response_length": 10,
        "eos_rate": 0.9,
        "score": 2.0,
        **keys,
    }


def evaluation(rewards: float, gold: float | None) -> dict[float, Evaluation]:
    grades = None if gold is None else [gold] * 64
    return {1.0: Evaluation(["words"] * 64, [rewards] * 64, grades)}


def test_the_history_is_the_first_rollout_and_the_last_ones() -> None:
    guard = Guard("stop", has_judge=True, kl_budget=10.0)
    for step in range(1, 21):
        assert guard.watch(step, line(step, entropy=step / 100 + 1), 64) == []
    assert [row["step"] for row in guard.rows] == [1, 17, 18, 19, 20]
    assert guard.rows[-1] == {
        "kl": 1.0, "entropy": 1.2, "clip_fraction": 0.1, "response_length": 10, "eos_rate": 0.9, "step": 20,
        "answers": 64,
    }  # fmt: skip


def test_after_a_warm_up_of_the_critic_entropy_is_compared_with_the_first_policy_that_learns() -> None:
    """The actor makes no steps in the first two rollouts, so their lines have none of its metrics."""
    guard = Guard("stop", has_judge=True, kl_budget=10.0)
    for step in (1, 2):
        metrics = line(step)
        del metrics["entropy"]
        assert guard.watch(step, metrics, 64) == []
    for step in (3, 4, 5, 6):
        assert guard.watch(step, line(step, entropy=0.5), 64) == []
    assert guard.rows[0]["step"] == 1 and guard.rows[0]["entropy"] == 0.5
    actual = [guard.watch(step, line(step, entropy=0.01), 64) for step in (7, 8, 9)]
    assert [each.sign for each in actual[-1]] == ["entropy"]


def test_a_resumed_guard_has_the_same_findings() -> None:
    """The state passes through JSON, as in a checkpoint. From step 8 on, 0.5 of the tokens are clipped.

    The means of three rollouts are then 0.19, 0.35 and 0.5.
    """

    def steps(guard: Guard, first: int) -> list[tuple[int, list[str], str]]:
        results = []
        for step in range(first, 13):
            findings = guard.watch(step, line(step, clip_fraction=0.04 if step < 8 else 0.5), 64)
            results.append((step, [each.sign for each in findings], guard.report(step, findings)))
        return results

    full = Guard("warn", has_judge=True, kl_budget=10.0)
    full.watch_evaluation(0, evaluation(0.1, 0.3), is_last=False)
    expected = steps(full, 1)
    assert [step for step, signs, _ in expected if signs == ["clip fraction"]] == [10, 11, 12]
    assert expected[9][2].startswith("guard: updates are too large: 50%") and expected[10][2] == ""  # once
    for killed in range(1, 12):
        first = Guard("warn", has_judge=True, kl_budget=10.0)
        first.watch_evaluation(0, evaluation(0.1, 0.3), is_last=False)
        steps_before = [first.watch(s, line(s, clip_fraction=0.04 if s < 8 else 0.5), 64) for s in range(1, killed + 1)]
        for step, findings in enumerate(steps_before, 1):
            first.report(step, findings)
        again = Guard("warn", has_judge=True, kl_budget=10.0)
        again.restore(json.loads(json.dumps(first.state())))
        assert steps(again, killed + 1) == expected[killed:]
        assert again.state() == full.state() and again.evaluations == full.evaluations


def test_later_evaluations_are_compared_with_the_best_and_the_first() -> None:
    guard = Guard("stop", has_judge=True, kl_budget=10.0)
    for step, reward, gold in ((0, 0.0, 0.5), (4, 1.0, 0.6), (8, 1.0, 0.9)):
        assert guard.watch_evaluation(step, evaluation(reward, gold), is_last=False) == []
        guard.best_step = step
    assert guard.watch_evaluation(12, evaluation(2.0, 0.95), is_last=False) == []
    assert guard.watch_evaluation(16, evaluation(2.0, 0.8), is_last=False) == []  # a quarter of the gain is lost
    (finding,) = guard.watch_evaluation(20, evaluation(2.0, 0.65), is_last=False)
    assert finding.sign == "gaming" and "step 8" in finding.sentence
    unwatched = Guard("off", True, 10.0, evaluations=guard.evaluations, best_step=8)
    assert unwatched.watch_evaluation(24, evaluation(2.0, 0.1), is_last=True) == []


@pytest.mark.parametrize("has_judge", [True, False])
def test_the_last_step_is_compared_with_the_best_one_also_after_a_resume(has_judge: bool) -> None:
    """A loss of 0.1 of a gain of 0.4 counts at the last step only. Gold decides, or the reward without a judge."""

    def graded(grade: float) -> dict[float, Evaluation]:
        return evaluation(2 - grade, grade) if has_judge else evaluation(grade, None)

    def watched(first_best: int) -> Guard:
        guard = Guard("rollback", has_judge, kl_budget=10.0)
        for step, grade in ((0, 0.5), (4, 0.9), (8, 0.8)):
            assert guard.watch_evaluation(step, graded(grade), is_last=False) == []
            if step in (0, first_best):
                guard.best_step = step
        resumed = Guard("rollback", has_judge, kl_budget=10.0)
        resumed.restore(json.loads(json.dumps(guard.state())))
        return resumed

    (finding,) = watched(4).watch_evaluation(12, graded(0.8), is_last=True)
    assert finding.sign == ("gaming" if has_judge else "reward") and not finding.lr_helps
    assert "is below that of step 4 by 0.10" in finding.sentence
    assert watched(4).watch_evaluation(12, graded(0.8), is_last=False) == []
    # If step 4 may not be the best one (its KL is outside of the budget), the guard could not export it.
    assert watched(8).watch_evaluation(12, graded(0.8), is_last=True) == []


def test_a_fall_counts_in_the_second_evaluation_also_after_a_resume() -> None:
    """Step 8 gained 0.4. Both later evaluations lose 0.15 of it."""
    guard = Guard("stop", has_judge=True, kl_budget=10.0)
    for step, gold in ((0, 0.5), (8, 0.9)):
        assert guard.watch_evaluation(step, evaluation(1.0, gold), is_last=False) == []
        guard.best_step = step
    assert guard.watch_evaluation(12, evaluation(2.0, 0.75), is_last=False) == []
    resumed = Guard("stop", has_judge=True, kl_budget=10.0)
    resumed.restore(json.loads(json.dumps(guard.state())))
    for each in (guard, resumed):
        (finding,) = each.watch_evaluation(16, evaluation(2.0, 0.75), is_last=False)
        assert finding.sign == "gaming" and "below that of step 8 by 0.15" in finding.sentence


def test_the_best_step_has_the_highest_mean_over_the_temperatures() -> None:
    """A step that gains 0.02 at temperature 1 and loses 0.10 greedily is not better: 0.61 is below 0.65."""
    guard = Guard("stop", has_judge=True, kl_budget=10.0)
    for sampled, greedy, mean in ((0.6, 0.7, 0.65), (0.62, 0.6, 0.61)):
        by_temperature = evaluation(1.0, sampled) | {0.0: evaluation(1.0, greedy)[1.0]}
        assert guard.selection(by_temperature) == {"mean_gold_score": pytest.approx(mean)}
    assert guard.selection(evaluation(1.0, None)) == {}
    assert Guard("stop", False, 10.0).selection(evaluation(0.3, None)) == {"mean_eval_score": pytest.approx(0.3)}


def test_steps_that_can_be_the_best() -> None:
    judged, single = (Guard("stop", has_judge=has_judge, kl_budget=10.0) for has_judge in (True, False))
    assert judged.best_metric == "mean_gold_score" and single.best_metric == "mean_eval_score"
    assert judged.may_be_best({"kl": 99.0}, [LARGE])
    assert single.may_be_best({"kl": 10.0}, []) and single.may_be_best({}, [])
    assert not single.may_be_best({"kl": 10.1}, []) and not single.may_be_best({"kl": 1.0}, [LARGE])


def begin(folder: Path, **keys: Any) -> tuple[StageRun, Any]:
    folder.mkdir(exist_ok=True)
    return stage_of(folder, 10, best_metric="gold_score", guard="stop", save_every=3, **keys)


def trained(stage: StageRun, engine: Any) -> None:
    """Run three steps, of which the second is the best."""
    stage.restore()
    for step in (1, 2, 3):
        stage.note_best(step, "gold_score", [0, 0.5, 0.9, 0.4][step], higher=True)
        work(stage, engine, step, step)
    stage.checkpoints.wait()


@pytest.mark.parametrize(
    ("action", "findings", "rollbacks", "outcome"),
    [
        ("warn", [LARGE], 0, "continues"),
        ("stop", [], 0, "continues"),
        ("stop", [LARGE], 0, "stops"),
        ("rollback", [LARGE], 0, "returns"),
        ("rollback", [LARGE], 1, "returns"),
        ("rollback", [LARGE], 2, "stops"),  # the limit is two rollbacks
        ("rollback", [LARGE, CUT], 0, "stops"),  # a smaller learning rate does not make answers longer
    ],
)
def test_each_reaction(
    action: Any,
    findings: list[Finding],
    rollbacks: int,
    outcome: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage, engine = begin(tmp_path / "ppo", eval_every=2)
    trained(stage, engine)
    guard = Guard(action, True, 10.0, [Rollback(9, 8, "x")] * rollbacks)
    if outcome == "returns":
        with pytest.raises(RestartStage, match="rolls back from step 3 to step 2"):
            guard.act(stage, 3, findings)
        assert read_rollbacks(stage.folder) == [Rollback(3, 2, "updates are too large")]
    else:
        guard.act(stage, 3, findings)
        assert read_rollbacks(stage.folder) == []
    stops = "stops the stage after step 3 of 10 and exports step 2 (0 is the SFT model"
    assert (stops in capsys.readouterr().out) == (outcome == "stops")
    assert stage.last_step == (3 if outcome == "stops" else 10)
    assert guard.stopped_step == (3 if outcome == "stops" else None)
    restored = Guard(action, True, 10.0)
    restored.restore(json.loads(json.dumps(guard.state())))
    assert restored.stopped_step == guard.stopped_step


def test_without_grades_no_step_is_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard = open_guard(tiny_config(ppo={"advantage": "distill"}), tmp_path, has_judge=False)
    assert guard.summary()["selects_by"] is None
    open_guard(tiny_config(), tmp_path, has_judge=False)
    assert "without evaluation.judge, the held-out reward selects the best step" in capsys.readouterr().out


def test_without_an_earlier_step_a_rollback_stops(tmp_path: Path) -> None:
    stage, _ = begin(tmp_path / "ppo")
    stage.restore()
    stage.note_best(0, "gold_score", 0.5, higher=True)
    guard = Guard("rollback", True, 10.0)
    guard.act(stage, 0, [LARGE])
    assert guard.stopped_step == 0 and list(stage.steps_left()) == []


def test_the_step_after_a_rollback_reports_it() -> None:
    guard = Guard("rollback", True, 10.0, [Rollback(9, 4, "the KL rose")])
    assert guard.report(5, []) == "guard: rolled back from step 9, because the KL rose"
    assert guard.report(6, []) == ""
    assert guard.summary()["rollbacks"] == [{"step": 9, "to": 4, "reason": "the KL rose"}]


def test_the_correlation_of_reward_and_judge_is_a_metric() -> None:
    """Ranks 1 2 3 4 against 2 1 4 3: the squared differences are 4, so 1 - 6 * 4 / (4 * 15) = 0.6."""
    first = Evaluation(["a"] * 4, [0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.4, 0.3])
    second = Evaluation(["a"] * 4, [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
    assert evaluation_metrics({1.0: first, 0.0: second}) == pytest.approx(
        {"judge_correlation": 0.6, "judge_correlation_at_0": -1.0}
    )
    assert evaluation_metrics(evaluation(1.0, None)) == {}
