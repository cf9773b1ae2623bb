"""The page about several seeds: verdict, spread, and the conditions for a comparison."""

import re
import shutil
import statistics
from itertools import cycle
from pathlib import Path

import pytest

from pipeline.data.records import Message
from pipeline.errors import UserError
from pipeline.evaluation.samples import Sample
from pipeline.launch.summary import compare_seeds
from pipeline.report.changes import change_over
from pipeline.report.data import read_run
from pipeline.report.report import main
from pipeline.report.seeds import write_seed_report
from pipeline.report.win_rate import pool_wins
from tests import composed
from tests.pipeline.report.example_runs import CONFIG, update_json, update_lines, write_demo_run
from tests.pipeline.report.test_report import check


def write_runs(folder: Path, *, gamed: tuple[int, ...] = ()) -> list[Path]:
    """Write three runs with the seeds 1 to 3. `gamed` are the seeds of gamed runs."""
    paths = [folder / f"demo-seed={seed}" for seed in (1, 2, 3)]
    for seed, path in enumerate(paths, start=1):
        write_demo_run(path, gamed=seed in gamed, seed=seed)
    return paths


def test_three_agreeing_seeds_give_a_verdict(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    path, verdict = write_seed_report(paths)
    assert path == tmp_path / "demo-seeds.html"
    assert (verdict.outcome, verdict.headline) == ("good", "RLHF helped over 3 seeds at temperatures 1 and 0.")
    means = r"Temperature 1: Over 3 seeds the mean gold score went from 0\.4\d after SFT to 0\.\d\d after PPO: \+0"
    assert re.match(means, verdict.evidence)
    assert "It rose in 3 of 3 seeds." in verdict.evidence and "between seeds and 0." in verdict.evidence
    page = path.read_text(encoding="utf-8")
    assert page.count(">3 of 3</td>") == 8  # of the two scores, from base to SFT and from SFT to PPO, two temperatures
    actual = check(page)
    for text in ("Gold score: change at temperature 0", "seed 2", "all seeds", "demo-seed=3", "SD, prompts",
                 "KL to the reference, nats per answer", "Held-out SFT loss", "Gold score at temperature 1 ",
                 "no common scale of scores"):  # fmt: skip
        assert text in actual.text, text
    assert "differ in more than the seed" not in actual.text and "failed" not in actual.text


def test_the_mean_over_seeds_is_that_of_the_paired_differences(tmp_path: Path) -> None:
    runs = [read_run(path) for path in write_runs(tmp_path)]
    actual = change_over(runs, "gold", "sft", "ppo", 0.0)
    means = []
    for run in runs:
        by_prompt = {sample.prompt: sample.gold["ppo"] - sample.gold["sft"] for sample in run.samples(0.0)}
        means.append(statistics.fmean(by_prompt.values()))
    assert actual is not None
    half = 4.302653 * statistics.stdev(means) / 3**0.5
    middle = statistics.fmean(means)
    assert (actual.mean, actual.low, actual.high) == pytest.approx((middle, middle - half, middle + half), rel=1e-3)


def test_seeds_with_one_prompt_have_no_change(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_demo_run(tmp_path / f"demo-seed={seed}", seed=seed, prompts=1)
    _, verdict = write_seed_report([tmp_path / "demo-seed=1", tmp_path / "demo-seed=2"])
    assert verdict.evidence == "They have no graded held-out answers in common."


def test_a_gamed_seed_prevents_success(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    finding = {"step": 6, "sign": "KL", "sentence": "the policy is far from the SFT model"}
    update_json(paths[1] / "ppo" / "summary.json", guard={"findings": [finding]})
    _, verdict = write_seed_report(paths)
    assert (verdict.outcome, verdict.headline) == ("open", "Training went wrong in 1 of 3 runs (demo-seed=2).")
    assert verdict.evidence.startswith("Signs of the training guard: demo-seed=2 at rollout 6 (KL).\n")
    assert "It rose in 3 of 3 seeds." in verdict.evidence


def judge_pairs(path: Path, verdicts: list[tuple[float | None, float | None]], *, gold: bool) -> None:
    """Add the verdicts of a pair judge to the answers of a run, and give all answers of SFT and PPO the same length."""
    pairs = cycle(verdicts)
    update_lines(
        path / "ppo" / "samples.jsonl",
        lambda row: (
            row
            | {"answers": {"sft": "one", "ppo": "two"}, "preferences": {"ppo": next(pairs)}}
            | ({} if gold else {"gold": {}, "scores": {}})
        ),
    )


def test_win_rates_over_seeds_by_hand(tmp_path: Path) -> None:
    """The seeds win 3, 2 and 4 of four pairs: 0.75 on average with a standard error of 0.25 / sqrt(3)."""
    paths = write_runs(tmp_path)
    win, loss = (1.0, 1.0), (0.0, 0.0)
    for path, won in zip(paths, (3, 2, 4), strict=True):
        judge_pairs(path, [win] * won + [loss] * (4 - won), gold=True)
    runs = [read_run(path) for path in paths]
    actual = pool_wins([run.samples(1.0) for run in runs], "ppo")
    assert actual is not None
    half = 4.302653 * 0.25 / 3**0.5
    assert (actual.plain.mean, actual.plain.low) == pytest.approx((0.75, 0.75 - half), rel=1e-4)
    assert actual.plain.high == 1.0  # 0.75 + half is above 1
    controlled = actual.controlled  # all answers have the same length
    assert (controlled.mean, controlled.low, controlled.high) == pytest.approx((0.75, 0.75 - half, 1.0), rel=1e-4)
    assert [one.wins for one in actual.by_seed] == [72, 48, 96]
    page, verdict = write_seed_report(paths)
    assert "Over 3 seeds, the pair judge prefers the answers of PPO to those of SFT in 75% of 288 pairs" in (
        verdict.evidence
    )
    text = check(page.read_text(encoding="utf-8")).text
    for words in ("PPO against SFT, pair by pair", "75.0% (12.9% to 100.0%)", "Length-controlled", "216"):
        assert words in text, words
    assert pool_wins([runs[0].samples(1.0), []], "ppo") is None


@pytest.mark.parametrize(("share", "halves"), [(True, 1.0), (False, 1 / 3**0.5)])
def test_win_rates_of_equal_seeds_keep_the_noise_of_their_prompts(share: bool, halves: float) -> None:
    """Three equal seeds win 15 of 20 pairs. Wilson's interval of one seed is 0.5313 to 0.8881.

    Other prompts for each seed divide its halves by sqrt(3).
    """
    seeds = [
        [
            Sample((Message("user", f"{0 if share else seed} {at}"),), {"sft": "one", "ppo": "two"},
                   preferences={"ppo": (won, won)})
            for at, won in enumerate([1.0] * 15 + [0.0] * 5)
        ]
        for seed in range(3)
    ]  # fmt: skip
    actual = pool_wins(seeds, "ppo")
    assert actual is not None
    assert (actual.controlled.mean, actual.controlled.low, actual.controlled.high) == pytest.approx(
        (0.75, 0.75 - 0.2187 * halves, 0.75 + 0.1381 * halves), abs=1e-4
    )
    assert actual.plain.high - actual.plain.low > 0.2 * halves


@pytest.mark.parametrize(
    ("verdicts", "outcome", "headline"),
    [
        ([(1.0, 1.0)] * 9 + [(0.0, 0.0)], "good", "The judge prefers PPO to SFT over 3 seeds"),
        ([(1.0, 1.0)] * 4 + [(None, 1.0)], "open", "No verdict of the judge on PPO over 3 seeds"),
    ],
)
def test_without_gold_the_pairs_decide_over_seeds(
    verdicts: list[tuple[float | None, float | None]], outcome: str, headline: str, tmp_path: Path
) -> None:
    paths = write_runs(tmp_path)
    for path, own in zip(paths, (verdicts, [(1.0, 1.0)], [(1.0, 1.0)]), strict=True):
        judge_pairs(path, own, gold=False)
    _, actual = write_seed_report(paths)
    assert (actual.outcome, actual.headline) == (outcome, f"{headline} at temperatures 1 and 0.")


def test_seeds_that_disagree_give_no_verdict(tmp_path: Path) -> None:
    _, verdict = write_seed_report(write_runs(tmp_path, gamed=(2,)))
    assert verdict.outcome == "open"
    assert verdict.headline == "No clear difference between SFT and PPO over 3 seeds at temperatures 1 and 0."
    assert "It rose in 2 of 3 seeds." in verdict.evidence


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    with pytest.raises(UserError, match="have the same seed 1"):
        write_seed_report([paths[0], paths[0]])
    with pytest.raises(UserError, match="no run folder"):
        write_seed_report([paths[0], tmp_path / "none"])
    (paths[1] / "ppo").rename(paths[1] / "dpo")
    with pytest.raises(UserError, match=r"different methods \(demo-seed=1 ends with ppo, demo-seed=2 ends with dpo\)"):
        write_seed_report(paths[:2])
    shutil.rmtree(paths[1] / "dpo")
    with pytest.raises(UserError, match="no finished PPO or DPO stage"):
        write_seed_report(paths[:2])


def test_other_differences_and_failures_are_shown(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    (paths[2] / "ppo" / "config.yaml").write_text(CONFIG.replace("seed: 1", "seed: 3").replace("tiny", "gpt2"))
    path, verdict = write_seed_report(paths, ["seed=4"])
    assert verdict.outcome == "open"
    assert verdict.headline.endswith(" 1 of 4 runs failed, so a gain over all seeds is not proven.")
    page = check(path.read_text(encoding="utf-8"))
    assert "These runs differ in more than the seed: model.name." in page.text
    assert "Not included, because they failed: seed=4." in page.text


def test_the_command_takes_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in write_runs(tmp_path)]
    assert main(paths) == 0
    output = capsys.readouterr().out
    assert output.startswith("RLHF helped over 3 seeds") and output.rstrip().endswith("demo-seeds.html")
    assert main([paths[0], paths[0]]) == 2 and "same seed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.startswith("usage: python zerochat.py report ")  # the command of a checkout


def test_a_multirun_compares_only_runs_that_differ_in_their_seed(tmp_path: Path) -> None:
    paths = write_runs(tmp_path)
    overrides = {"seed=1": ["seed=1"], "seed=2": ["seed=2"], "other": ["seed=3", "ppo.kl_coef=0.2"]}
    configs = {label: composed.config_of(*keys) for label, keys in overrides.items()}
    runs = {label: ("ppo", path) for label, path in zip(overrides, paths, strict=True)}
    output = compare_seeds(configs, runs)
    assert "verdict RLHF helped over 2 seeds" in output or "verdict No clear difference" in output
    assert output.count("report ") == 1 and "Over 2 seeds" in output and output.startswith("-- demo-seeds\nverdict")
    assert compare_seeds(configs, {**runs, "seed=2": ("ppo", None)}) == ""
