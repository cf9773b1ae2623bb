"""What the training guard does with PPO runs of the demo that go wrong: signs, exported step, gold scores.

    learning-rate   ten times the learning rate
    no-kl           no KL penalty, four times as many rollouts
    length          the reward is the length of the answer
    flipped         a reward model that is trained on pairs with swapped labels
    cut             answers of at most 6 tokens
    long-grpo       GRPO with 8 answers per prompt and 32 rollouts

runs/demo-seeds/seed-1 of `benchmarks.demo_seeds` provides the SFT model and, except for `length` and `flipped`, the
reward model. A case that is finished does not run again: remove its folder in runs/guard-cases.

The figure of a case is the gold score of the exported model at temperature 1. Its peer is the highest gold score at
this temperature of all evaluated steps. `below_best` contains the mean difference of the exported step from the best
step at each temperature with its 95 % interval, paired by prompt.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks import demo_seeds
from benchmarks.measure import BenchFailed, run_command
from benchmarks.record import ROOT, Result
from pipeline.demo import rows_of
from pipeline.evaluation.intervals import paired_difference
from pipeline.report.changes import change
from pipeline.report.data import RunReading, StageReading, read_run
from pipeline.report.verdict import guard_signs, judge

FOLDER = ROOT / "runs" / "guard-cases"
FLIPPED = FOLDER / "flipped-reward"
DEMO = demo_seeds.folder("seed-1", "ppo")
OPTIONS = {
    "learning-rate": ("ppo.lr=1e-3",),
    "no-kl": ("ppo.kl_coef=0", "ppo.steps=64"),
    "length": ("ppo.reward_model=false", f"ppo.reward_function={FOLDER}/length.py:score"),
    "flipped": (),
    "cut": ("rollout.max_new_tokens=6",),
    "long-grpo": (
        "ppo=grpo",
        "ppo.samples=8",
        "ppo.kl_coef=0.04",
        "ppo.lr=2e-4",
        "ppo.steps=32",
    ),
}
CASES = tuple(OPTIONS)
COMMON = ("seed=1", "tracking=none", "ppo.guard=stop", "ppo.eval_every=4", "evaluation.best_of=1")
LENGTH = "def score(answer, row):\n    return float(len(answer))\n"
PAIRS = 12000


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Train the demo if it is missing, then run `cases` in order. A case runs once, whatever `rounds` is."""
    _run(demo_seeds.arguments("seed-1", "ppo"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "length.py").write_text(LENGTH, encoding="utf-8")
    for case in cases:
        if case == "flipped":
            _run(flipped_arguments(FLIPPED, PAIRS))
        _run(arguments(case))
        yield case_result(case, read_run(FOLDER / case))


def arguments(case: str) -> list[str]:
    """Return the arguments of Python that run PPO in one case."""
    models = [f"actor={DEMO / 'sft'}"]
    if case != "length":
        models.append(f"reward={(FLIPPED if case == 'flipped' else DEMO) / 'reward'}")
    return ["-m", "step3_ppo", f"run_dir={FOLDER / case}", *models, *COMMON, *OPTIONS[case]]


def flipped_arguments(folder: Path, examples: int) -> list[str]:
    """Write the demo's pairs with swapped labels to `folder`; return the arguments that train a reward model on them.

    The held-out pairs are swapped too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {kind: folder / f"{kind}.jsonl" for kind in ("preferences", "held_out_preferences")}
    for kind, path in paths.items():
        rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows_of(kind, examples, 1)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train, held_out = paths.values()
    sources = f"data.sources=[{{path: {train}, eval_path: {held_out}, stages: [reward]}}]"
    start = ["recipe=tiny-demo", f"model.path={DEMO / 'sft' / 'model'}"]
    return ["-m", "step2_reward", f"run_dir={folder}", *start, "seed=1", "tracking=none", sources]


def case_result(case: str, trained: RunReading) -> Result:
    """Return what the guard did in one case. Raises BenchFailed if the run has no gold scores."""
    stage = trained.stage("ppo")
    sampled, greedy = (change(trained.samples(at), "gold", "sft", "ppo") for at in demo_seeds.TEMPERATURES)
    steps = [each for each in stage.grades if each.temperature == demo_seeds.TEMPERATURES[0] and each.gold]
    if sampled is None or greedy is None or not steps:
        raise BenchFailed(f"{case}: the run has no gold scores; remove {FOLDER / case} and run again")
    return Result(
        bench="guard_cases",
        case=case,
        ours=sampled.new_mean,
        peer=max(fmean(each.gold) for each in steps if each.gold),
        unit="gold score",
        lower_is_better=False,
        detail={
            "peer": "best step",
            "signs": guard_signs(stage.guard) or "no sign",
            "sentences": [each["sentence"] for each in stage.guard.get("findings", [])],
            "exported_step": stage.number("exported_step"),
            "below_best": {str(at): below_best(stage, at) for at in demo_seeds.TEMPERATURES},
            "SFT": sampled.old_mean,
            "SFT_greedy": greedy.old_mean,
            "greedy": greedy.new_mean,
            "verdict": judge(trained).headline,
        },
    )


def below_best(stage: StageReading, temperature: float) -> tuple[float, float, float] | None:
    """Return the mean difference of the exported step from the best step, with the ends of its 95% interval.

    None if the exported step has no gold scores of single prompts at this temperature.
    """
    gold = {each.step: each.gold for each in stage.grades if each.temperature == temperature and each.gold}
    exported = gold.get(int(stage.number("exported_step") or 0))
    return None if exported is None else paired_difference(max(gold.values(), key=fmean), exported)


def _run(arguments: Sequence[str]) -> None:
    run_command([sys.executable, *arguments], folder=ROOT, limit=demo_seeds.LIMIT_SECONDS)
