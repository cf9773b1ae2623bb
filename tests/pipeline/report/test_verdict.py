import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.records import Message
from pipeline.evaluation.samples import Sample
from pipeline.launch.summary import stage_figures, summarize_run
from pipeline.report.changes import change, standings
from pipeline.report.data import RunReading, StageReading, read_run
from pipeline.report.gaming import gaming_at
from pipeline.report.report import render_report
from pipeline.report.verdict import conclusion, judge
from tests.pipeline.report.example_runs import run_of, write_demo_run, write_stage

PROMPT = (Message("user", "hi"),)


def samples(sft: Sequence[float], ppo: Sequence[float], *, reward: float | None = None) -> list[Sample]:
    """Return samples with these gold scores. PPO's reward scores exceed SFT's by `reward`."""
    results = []
    for old, new in zip(sft, ppo, strict=True):
        scores = {} if reward is None else {"sft": old, "ppo": old + reward}
        results.append(Sample(PROMPT, {"sft": "a", "ppo": "b"}, scores, {"sft": old, "ppo": new}))
    return results


def scored(gain: float, *, prompts: int = 20, **kinds: Any) -> list[Sample]:
    """Return samples without gold scores whose scores rise by `gain` from SFT to PPO."""
    values = [0.1 * (n % 5) for n in range(prompts)]
    return [Sample(PROMPT, {}, {"sft": value, "ppo": value + gain}, **kinds) for value in values]


HELPED = "RLHF helped at temperatures 1 and 0.\nTemperature 1: On the same 96 held-out prompts"
SPREAD = [0.1 * (n % 5) for n in range(40)]


@pytest.mark.parametrize(
    ("gain", "reward", "outcome", "headline"),
    [
        (0.3, 1.0, "good", "RLHF helped at temperature 1."),
        (-0.3, 1.0, "bad", "RLHF hurt (the reward model was gamed) at temperature 1."),
        (-0.3, -1.0, "bad", "RLHF hurt at temperature 1."),
        (-0.3, None, "bad", "RLHF hurt at temperature 1."),
    ],
)
def test_gold_decides(gain: float, reward: float | None, outcome: str, headline: str) -> None:
    verdict = judge(run_of(samples(SPREAD, [value + gain for value in SPREAD], reward=reward)))
    assert (verdict.outcome, verdict.headline) == (outcome, headline)
    assert "40 held-out prompts" in verdict.evidence
    assert "not other training seeds" in verdict.caveat


@pytest.mark.parametrize(
    ("sft", "ppo", "headline", "reason"),
    [
        (
            SPREAD,
            [v + (0.2 if at % 2 else -0.2) for at, v in enumerate(SPREAD)],
            "No clear difference",
            "contains zero",
        ),
        ([0.1] * 4, [0.9] * 4, "No verdict on PPO at temperature 1.", "too few"),
        ([0.1], [0.9], "No verdict on PPO at temperature 1.", "the same held-out prompt the mean"),
    ],
)
def test_an_interval_around_zero_and_few_prompts_give_no_verdict(
    sft: list[float], ppo: list[float], headline: str, reason: str
) -> None:
    verdict = judge(run_of(samples(sft, ppo)))
    assert verdict.outcome == "open" and headline in verdict.headline and reason in verdict.evidence


@pytest.mark.parametrize(("settings", "count"), [({"evaluation": {"best_of": 4}}, "4"), ({}, "n")])
def test_the_verdict_compares_with_the_best_sft_answers(settings: dict[str, Any], count: str) -> None:
    rows = [
        replace(row, gold={**row.gold, "best_of": row.gold["sft"] + 0.1})
        for row in samples(SPREAD, [value + 0.3 for value in SPREAD])
    ]
    run = run_of(rows, settings)
    evidence = " ".join(judge(run).evidence.split())
    assert f"The best of {count} SFT answers by the reward model has a mean gold score of 0.30; PPO differs" in evidence
    assert "from it by +0.20" in evidence
    assert run.labels["best_of"] == f"SFT, best of {count}"


@pytest.mark.parametrize(
    ("export", "gain", "outcome"), [("best", 0.3, "open"), ("best", -0.3, "bad"), ("last", 0.3, "good")]
)
def test_a_model_selected_on_these_prompts_is_named(export: str, gain: float, outcome: str) -> None:
    """The best of several evaluations has a score that is too high by chance."""
    rows = samples(SPREAD, [value + gain for value in SPREAD])
    verdict = judge(run_of(rows, {"ppo": {"export": export}}, exported_step=2))
    chosen = "The model of rollout 2 was selected by its score on these prompts"
    assert (chosen in verdict.evidence) == (export == "best")
    more = " The same prompts selected the model, so a gain is not proven." if export == "best" else ""
    assert verdict.headline == f"RLHF {'helped' if gain > 0 else 'hurt'} at temperature 1.{more}"
    assert verdict.outcome == outcome


def test_an_exported_start_model_is_named() -> None:
    run = run_of(samples(SPREAD, SPREAD), {"ppo": {"export": "best"}}, exported_step=0)
    assert judge(run).evidence == "ppo.export=best selected no rollout: the exported model is the unchanged SFT model."


@pytest.mark.parametrize(
    ("greedy_gain", "outcome", "headline"),
    [
        (0.3, "good", "RLHF helped at temperatures 0.7 and 0."),
        (0.0, "open", "RLHF helped at temperature 0.7. No clear difference between SFT and PPO at temperature 0."),
        (-0.3, "bad", "RLHF helped at temperature 0.7. RLHF hurt at temperature 0."),
    ],
)
def test_rlhf_helped_only_if_it_helped_at_each_temperature(greedy_gain: float, outcome: str, headline: str) -> None:
    rows = [
        replace(sample, temperature=temperature)
        for temperature, gain in ((0.7, 0.3), (0.0, greedy_gain))
        for sample in samples(SPREAD, [value + gain for value in SPREAD])
    ]
    verdict = judge(run_of(rows))
    assert (verdict.outcome, verdict.headline) == (outcome, headline)
    assert "Temperature 0.7: On the same 40" in verdict.evidence and "Temperature 0: On the same 40" in verdict.evidence


def test_without_gold_the_reward_score_is_not_called_success() -> None:
    verdict = judge(run_of(scored(1.0)))
    assert verdict.outcome == "open"
    assert verdict.headline == "The reward score rose with PPO at temperature 1."
    assert "trained on this score" in verdict.evidence and "too few" not in verdict.evidence
    verdict = judge(run_of(scored(1.0, prompts=4)))
    assert "did not clearly change" in verdict.headline and "too few" in verdict.evidence


BY_FUNCTION = {"ppo": {"reward_function": "mine.py:score", "reward_model": False}}


@pytest.mark.parametrize(("gain", "outcome", "moved"), [
    (0.25, "good", "rose"), (-0.25, "bad", "fell"), (0.0, "open", "did not clearly change"),
])  # fmt: skip
def test_a_functions_score_on_held_out_prompts_is_a_verdict(gain: float, outcome: str, moved: str) -> None:
    verdict = judge(run_of(scored(gain), BY_FUNCTION))
    assert (verdict.outcome, verdict.headline) == (
        outcome,
        f"The reward function's score {moved} with PPO at temperature 1.",
    )
    assert "20 held-out prompts the mean score went from 0.200 after SFT" in verdict.evidence
    assert "trained on this function with other prompts" in verdict.evidence and "reward model" not in verdict.evidence


def test_the_mean_of_a_model_has_an_interval() -> None:
    """Deviation sqrt(20 / 19 * 0.02), half width 2.093 * 0.1451 / sqrt(20). Shares of right answers: Wilson's."""
    labels = {"sft": "SFT", "ppo": "PPO"}
    old, _ = standings(scored(0.0), "scores", labels)
    assert (old.mean, old.low, old.high) == pytest.approx((0.2, 0.132, 0.268), abs=5e-4)
    shares = standings([Sample(PROMPT, {}, {"sft": 0.0, "ppo": float(n == 0)}) for n in range(16)], "scores", labels)
    assert [(row.low, row.high) for row in shares] == [pytest.approx((0, 0.194), abs=5e-4),
                                                       pytest.approx((0.0111, 0.283), abs=5e-4)]  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "settings", "headline", "evidence"),
    [
        ({"ppo": StageReading("ppo", rows=[{"step": 7.0}])}, {}, "PPO has not finished.",
         "SFT has finished. PPO is unfinished, at step 7. Run the same command again to resume"),
        ({}, {}, "PPO has not run.", "SFT has finished. Run the same command again to resume, or with stage=all"),
        ({}, {"method": "dpo"}, "DPO has not run.", "SFT has finished."),
    ],
)  # fmt: skip
def test_a_run_without_a_finished_policy_shows_its_progress(
    stages: dict[str, StageReading], settings: dict[str, Any], headline: str, evidence: str
) -> None:
    verdict = judge(RunReading("run", {"sft": StageReading("sft", summary={"steps": 3}), **stages}, settings))
    assert verdict.headline == f"No verdict yet: {headline}" and verdict.evidence.startswith(evidence)


def test_summarize_run_prints_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_demo_run(tmp_path)
    monkeypatch.setattr(StageReading, "rollouts", property(lambda _: pytest.fail("the file may have gigabytes")))
    verdict = conclusion(tmp_path)
    assert verdict is not None and verdict.startswith(HELPED)
    lines = summarize_run(tmp_path, verdict).splitlines()
    assert "verdict RLHF helped at temperatures 1 and 0." in lines
    assert [line[:22] for line in lines if line.startswith("        Temp")] == [
        "        Temperature 1:",
        "        Temperature 0:",
    ]
    took = json.loads((tmp_path / "ppo" / "summary.json").read_text())["seconds"]
    (tmp_path / "ppo" / "plan.json").write_text(json.dumps({"stage_seconds": took / 2}))
    (planned,) = (line for line in summarize_run(tmp_path, verdict).splitlines() if line.startswith("time"))
    assert planned.startswith("time    ppo planned ") and planned.endswith(" (2.00 x)")
    assert "wandb" not in "\n".join(lines)
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    upload = f"wandb   offline; to upload: wandb sync {tmp_path}/wandb/offline-run-*"
    assert upload in summarize_run(tmp_path, verdict).splitlines()
    (tmp_path / "ppo" / "summary.json").unlink()
    assert conclusion(tmp_path) is None and "verdict" not in summarize_run(tmp_path)


def test_the_summary_line_has_no_figures_of_another_model(tmp_path: Path) -> None:
    summary = {"steps": 4, "eval_score": 0.5, "final": {"eval_score": 0.1, "kl": 3.0, "response_length": 9}}
    write_stage(tmp_path / "ppo", [{"step": 4}], summary)
    assert stage_figures(tmp_path, "ppo") == "eval_score 0.5  kl 3  response_length 9"
    write_stage(tmp_path / "ppo", [{"step": 4}], {**summary, "exported_step": 2})
    assert stage_figures(tmp_path, "ppo") == "eval_score 0.5"


def with_dpo(run_dir: Path, *, finished: str) -> str | None:
    """Add a DPO stage on the same prompts, with gold scores 0.25 below PPO's."""
    rows = []
    for line in (run_dir / "ppo" / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        gold = {**row["gold"], "dpo": row["gold"].pop("ppo") - 0.25}
        answers = {**row["answers"], "dpo": "so"}
        del answers["ppo"]
        rows.append({**row, "answers": answers, "gold": gold, "scores": {}})
    summary = {"steps": 9, "gold_score": 0.4, "eval_accuracy": 0.75, "eval_pairs": 64}
    write_stage(run_dir / "dpo", [{"step": 9, "loss": 0.5, "margin": 1.0}], summary, rows)
    times = {"ppo": {"finished": "2026-11-22T10:00:00"}, "dpo": {"finished": finished}}
    (run_dir / "manifest.json").write_text(json.dumps({"identity": {}, "request": "", "stages": times}))
    return conclusion(run_dir)


def test_the_last_finished_of_ppo_and_dpo_is_judged(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    earlier = with_dpo(tmp_path, finished="2026-11-21T10:00:00")
    assert earlier is not None and earlier.startswith(HELPED)
    later = with_dpo(tmp_path, finished="2026-11-23T10:00:00")
    assert later is not None and "DPO" in later.partition(".")[0] and "after DPO: " in later and "PPO" not in later
    assert f"model   {tmp_path}/dpo/model" in summarize_run(tmp_path, later)
    run = read_run(tmp_path)
    assert [row.label for row in standings(run.samples(0.0), "gold", run.labels)] == ["Base", "SFT", "DPO", "PPO"]
    gap = change(run.samples(0.0), "gold", "dpo", "ppo")
    assert gap is not None and gap.mean == pytest.approx(0.25) and gap.worse == gap.same == 0
    page = render_report(run)
    assert "Direct preference optimization" in page and "SFT to DPO" in page and "SFT to PPO" in page


@pytest.mark.parametrize(
    ("made", "settings", "again"),
    [
        ({"sft": "a", "reward": "b"}, {}, []),
        ({"sft": "c", "reward": "b"}, {}, ["SFT"]),
        ({"sft": "c", "reward": "d"}, {}, ["SFT", "Reward"]),
        ({"sft": "c", "reward": "d"}, {"actor": "other", "reward_path": "other"}, []),
        ({}, {}, []),
    ],
)
def test_models_that_were_trained_again_after_ppo_are_named(
    made: dict[str, str], settings: dict[str, Any], again: list[str]
) -> None:
    records: dict[str, Any] = {stage: {"produced": {"model": model}} for stage, model in made.items()}
    records["ppo"] = {"consumed": {"models": {"actor": "a", "reward": "b"}}}
    run = replace(run_of(samples([0.5] * 9, [0.9] * 9), settings), manifest={"stages": records})
    assert run.trained_again == again
    notice = f"PPO started from earlier models of {' and '.join(again)}: run stage=ppo"
    assert (notice in judge(run).evidence) == bool(again)


def test_dpo_after_ppo_does_not_hide_the_reward_scores_of_the_same_answers(tmp_path: Path) -> None:
    write_demo_run(tmp_path)
    before = gaming_at(read_run(tmp_path), 1.0)
    with_dpo(tmp_path, finished="2026-11-23T10:00:00")
    run = read_run(tmp_path)
    assert run.policy == "dpo" and before.outcome == "good"
    assert gaming_at(run, 1.0) == before
    page = render_report(run)
    assert "Gold scores before and after" in page and "Reward scores before and after" not in page


def test_dpo_without_gold_has_no_verdict() -> None:
    dpo = StageReading("dpo", summary={"steps": 1, "eval_accuracy": 0.75, "eval_pairs": 64})
    verdict = judge(RunReading("run", {"dpo": dpo}, {}))
    assert (verdict.outcome, verdict.headline) == ("open", "DPO has finished.")
    assert verdict.evidence.startswith("This data has no gold score")
    answers = [Sample(PROMPT, {"sft": "a", "dpo": "b"}, temperature=temperature) for temperature in (1.0, 0.0)]
    assert judge(RunReading("run", {"dpo": replace(dpo, samples=answers)}, {})) == verdict


def test_distillation_without_a_judge_names_the_setting() -> None:
    run = RunReading("run", {"ppo": StageReading("ppo", summary={"steps": 1})}, {"ppo": {"advantage": "distill"}})
    verdict = judge(run)
    assert (verdict.outcome, verdict.headline) == ("open", "Distillation has finished.")
    assert verdict.evidence.startswith("This data has no gold score") and "set evaluation.judge" in verdict.evidence


def test_change_counts_prompts_that_both_models_have() -> None:
    rows = samples([0.5, 0.5, 0.5], [0.75, 0.5, 0.0])
    rows.append(Sample(PROMPT, {"sft": "only"}, gold={"sft": 1.0}))
    actual = change(rows, "gold", "sft", "ppo")
    assert actual is not None
    assert (actual.better, actual.same, actual.worse, actual.prompts) == (1, 1, 1, 3)
    assert (actual.old_mean, actual.new_mean) == pytest.approx((0.5, 1.25 / 3))
    assert actual.mean == pytest.approx(-0.25 / 3)
    assert change(rows, "gold", "base", "sft") is None
    assert [row.label for row in standings(rows, "gold", run_of(rows).labels)] == ["SFT", "PPO"]


def guarded(guard: dict[str, Any], exported: int = 4) -> RunReading:
    """Return a finished run of ten prompts whose gold score rose from 0 to 0.5, with this summary of its guard."""
    rows = [Sample((Message("user", str(i)),), {}, {}, {"sft": 0.0, "ppo": 0.5}) for i in range(10)]
    return run_of(rows, exported_step=exported, guard=guard)


def test_a_run_with_a_finding_is_no_success() -> None:
    finding = {"step": 6, "sign": "length", "sentence": "the reward is mostly the length"}
    stopped = judge(guarded({"findings": [finding], "stopped_step": 6, "selects_by": "gold score"}))
    assert stopped.outcome == "open" and "helped" not in stopped.headline + stopped.evidence
    assert stopped.headline == (
        "Training went wrong at rollout 6 (length). The guard stopped it and exported the model of rollout 4."
    )
    assert stopped.evidence.startswith(
        "Guard: the reward is mostly the length.\nTemperature 1: On the same 10 held-out"
    )
    assert "The model of rollout 4 was selected by its gold score on these prompts" in stopped.evidence
    to_sft = judge(guarded({"findings": [finding], "stopped_step": 6}, exported=0))
    assert to_sft.headline.endswith("The guard stopped it and exported the SFT model.")
    second = {"step": 6, "sign": "KL", "sentence": "the KL is large"}
    both = judge(guarded({"findings": [finding, second], "stopped_step": 6}))
    assert both.evidence.splitlines()[:2] == ["Guard: the reward is mostly the length.", "Guard: the KL is large."]
    warned = judge(guarded({"findings": [finding], "stopped_step": None}))
    assert warned.headline == "Training went wrong at rollout 6 (length)." and warned.outcome == "open"
    initial = judge(guarded({"findings": [finding | {"step": 0, "sign": "judge"}], "stopped_step": None}))
    assert initial.headline == "Training went wrong before rollout 1 (judge)."


def test_a_run_without_findings_keeps_its_verdict() -> None:
    plain = judge(guarded({"findings": [], "stopped_step": None}))
    assert plain.outcome == "good" and plain.headline == "RLHF helped at temperature 1."
    assert plain == judge(guarded({}))
    back = {"step": 9, "to": 4, "reason": "the KL rose"}
    returned = judge(guarded({"findings": [], "stopped_step": None, "rollbacks": [back]}))
    assert returned.headline == plain.headline
    assert returned.evidence.endswith("The guard returned from rollout 9 to rollout 4, because the KL rose.")
    to_start = judge(guarded({"rollbacks": [back | {"to": 0}]}))
    assert to_start.evidence.endswith("The guard returned from rollout 9 to the SFT model, because the KL rose.")
