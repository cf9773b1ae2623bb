"""Gold scores of the demo by seed: PPO, GRPO and DPO from one SFT model, at temperature 1 and 0.

A case is a seed. runs/demo-seeds/seed-N contains the demo itself (SFT, reward model, PPO). GRPO and DPO start from the
SFT model of this run, and GRPO uses its reward model. All methods answer the same held-out prompts. A seed gives the
same figures each time, so a case runs once, whatever `rounds` is. The same command skips finished stages.

The figure of a case is the gold score at temperature 1. Its peer is the best of four SFT answers by the reward model.
Brackets contain 95 % intervals of the change from SFT (or from the best of four), paired by prompt.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, run_command
from benchmarks.record import ROOT, Result
from pipeline.evaluation.intervals import SeedEffect, mean_over_seeds
from pipeline.evaluation.samples import BEST_OF
from pipeline.report.changes import Change, change, change_over
from pipeline.report.data import RunReading, read_run
from pipeline.report.verdict import guard_signs

CASES = tuple(f"seed-{seed}" for seed in range(1, 11))
FOLDER = ROOT / "runs" / "demo-seeds"
LIMIT_SECONDS = 4 * 3600.0
METHODS = {
    "ppo": ("train.py",),
    "grpo": ("-m", "step3_ppo", "ppo=grpo", "ppo.samples=8", "ppo.steps=10", "ppo.kl_coef=0.04", "ppo.lr=2e-4"),
    "dpo": ("-m", "step2_dpo"),
}
TEMPERATURES = (1.0, 0.0)


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Train and measure `cases` in order, then yield the figures of each method over these seeds."""
    for case in cases:
        for method in METHODS:
            run_command([sys.executable, *arguments(case, method)], folder=ROOT, limit=LIMIT_SECONDS)
            yield seed_result(case, method, read_run(folder(case, method)), read_run(folder(case, "ppo")))
    if len(cases) > 1:
        for method in METHODS:
            runs, demos = ([read_run(folder(case, kind)) for case in cases] for kind in (method, "ppo"))
            yield pooled_result(method, runs, demos)


def folder(case: str, method: str) -> Path:
    """Return the run folder of a seed and a method."""
    return FOLDER / (case if method == "ppo" else f"{case}-{method}")


def arguments(case: str, method: str) -> list[str]:
    """Return the arguments of Python that train one method."""
    own = [f"seed={case.removeprefix('seed-')}", f"run_dir={folder(case, method)}", "tracking=none"]
    if method != "ppo":
        own.append(f"actor={folder(case, 'ppo') / 'sft'}")
    if method == "grpo":
        own.append(f"reward={folder(case, 'ppo') / 'reward'}")
    return [*METHODS[method], *own]


def seed_result(case: str, method: str, trained: RunReading, demo: RunReading) -> Result:
    """Return the figures of one seed and method.

    trained: the run of the method
    demo: the run of PPO with this seed, which has the best of four SFT answers
    Raises BenchFailed if a run has no gold scores.
    """
    bests = {sample.key: sample for sample in demo.samples(TEMPERATURES[0])}
    own = [sample.merge(bests.get(sample.key)) for sample in trained.samples(TEMPERATURES[0])]
    sampled = change(own, "gold", "sft", trained.policy)
    greedy = change(trained.samples(TEMPERATURES[1]), "gold", "sft", trained.policy)
    best = change(own, "gold", BEST_OF, trained.policy)
    if sampled is None or greedy is None or best is None:
        raise BenchFailed(f"{case} {method}: the run has no gold scores; remove {folder(case, method)} and run again")
    return Result(
        bench="demo_seeds",
        case=f"{case} {method}",
        ours=sampled.new_mean,
        peer=best.old_mean,
        unit="gold score",
        lower_is_better=False,
        detail={
            "peer": "best of 4",
            "prompts": sampled.prompts,
            "SFT": sampled.old_mean,
            "change": describe(sampled),
            "change_from_best": describe(best),
            "SFT_greedy": greedy.old_mean,
            "greedy": greedy.new_mean,
            "change_greedy": describe(greedy),
            "guard": guard_signs(trained.stage(trained.policy).guard) or "no sign",
        },
    )


def above_best(trained: RunReading, demo: RunReading, temperature: float) -> dict[Any, float]:
    """Return the gold scores of a method by prompt, less those of the best of four SFT answers at temperature 1."""
    bests = {sample.prompt: sample.gold[BEST_OF] for sample in demo.samples(TEMPERATURES[0]) if BEST_OF in sample.gold}
    own = {sample.prompt: sample.gold.get(trained.policy) for sample in trained.samples(temperature)}
    return {prompt: gold - bests[prompt] for prompt, gold in own.items() if gold is not None and prompt in bests}


def describe(found: Change | SeedEffect) -> str:
    """Return a change with its interval."""
    return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def pooled_result(method: str, runs: Sequence[RunReading], demos: Sequence[RunReading]) -> Result:
    """Return the figures of a method over several seeds. The intervals also cover other seeds.

    runs: the runs of the method by seed
    demos: the runs of PPO with these seeds, which have the best of four SFT answers
    """
    policy = runs[0].policy
    detail: dict[str, float | str] = {"seeds": len(runs)}
    for name, temperature in zip(("sampled", "greedy"), TEMPERATURES, strict=True):
        found = change_over(runs, "gold", "sft", policy, temperature)
        if found is None:
            raise BenchFailed(f"{method}: the runs have no gold scores at temperature {temperature:g}")
        changes = [one.mean for one in found.by_seed]
        detail[f"SFT_{name}"] = found.old_mean
        detail[name] = found.new_mean
        detail[f"change_{name}"] = describe(found)
        detail[f"seeds_{name}"] = f"{min(changes):+.2f} to {max(changes):+.2f}"
        ahead = [above_best(run, demo, temperature) for run, demo in zip(runs, demos, strict=True)]
        detail[f"from_best_{name}"] = describe(mean_over_seeds(ahead))
    return Result(
        bench="demo_seeds",
        case=f"{method}, {len(runs)} seeds",
        ours=float(detail["sampled"]),
        unit="gold score",
        lower_is_better=False,
        detail=detail,
    )
