"""`plan`: seconds of a step that `stage=plan` predicts from its probe, beside those of the run that follows.

All three stages, tiny model and OPT-125M shape, several layouts. Rows of the data are cut to the longest length, so
that steps are as long as a plan takes them to be; of PPO's prompts the mean length counts.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import median, medians_by_name, run_command
from benchmarks.ranks import run_ranks
from benchmarks.record import ROOT, Result

STAGES = ("sft", "reward", "ppo")
LIMIT_SECONDS = 600.0
TINY = ("model=tiny", "sft.batch_size=16", "reward.batch_size=8", "ppo.batch_size=16", "rollout.max_new_tokens=64")
OPT = (
    "model=opt-125m",
    "model.weights=random",
    "model.tokenizer=train",
    "engine.dtype=bf16",
    "sft.batch_size=8",
    "reward.batch_size=4",
    "ppo.batch_size=8",
    "rollout.max_new_tokens=32",
)
SHARED = (
    "tracking=none",
    "evaluation.prompts=2",
    *(
        f"{stage}.{key}"
        for stage in STAGES
        for key in (
            "steps=4",
            "max_length=256",
            "micro_batch_tokens=1024",
            "save_every=1000",
            "eval_examples=4",
        )
    ),
    "sft.log_every=1",
    "reward.log_every=1",
    "ppo.log_every=1",
    "ppo.eval_every=0",
    "ppo.update_epochs=1",
    "rollout.max_prompt_tokens=192",
)
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tiny zero0 x1": (1, (*TINY, "engine=zero0")),
    "tiny zero1 x2": (2, (*TINY, "engine=zero1")),
    "tiny zero3-nvme x1": (1, (*TINY, "engine=zero3-nvme")),
    "opt zero0 x1": (1, (*OPT, "engine=zero0")),
    "opt zero2-offload x2": (2, (*OPT, "engine=zero2-offload")),
}


def measure(rounds: int) -> Result:
    """Ours is the share of phases that are predicted within 30 % of what they took."""
    ratios: dict[str, float] = {}
    for name in SETTINGS:
        runs = [compared(name) for _ in range(rounds)]
        for phase, values in medians_by_name(runs).items():
            ratios[f"{name} {phase}"] = values
    near = [1 / 1.3 <= ratio <= 1.3 for ratio in ratios.values()]
    return Result(
        bench="zero",
        case="plan",
        ours=100 * sum(near) / len(near),
        unit="% of phases within 30 %",
        lower_is_better=False,
        detail={"predicted_by_measured": ratios},
    )


def compared(name: str) -> dict[str, float]:
    """Predicted by measured seconds of one setting, by stage and phase."""
    ranks, words = SETTINGS[name]
    folder = Path(tempfile.mkdtemp(prefix="zerochat-plan-"))
    try:
        data, run_dir = folder / "long.jsonl", folder / "run"
        write_data(data)
        words = (*SHARED, *words, f"ranks={ranks}", "stage=all", f"data.path={data}", f"run_dir={run_dir}")
        run_command([sys.executable, "train.py", *words], folder=ROOT, limit=LIMIT_SECONDS)
        threads = max(1, (os.cpu_count() or 1) // ranks)
        found = run_ranks("benchmarks.zero.plan.predict", [str(run_dir), *STAGES], ranks, threads=threads)[0]
        ratios: dict[str, float] = {}
        for stage in STAGES:
            wanted, took = joined(found[stage]), taken(run_dir / stage)
            told = ", ".join(f"{phase} {wanted[phase]:.3f}/{took[phase]:.3f}" for phase in took)
            print(f"{name}, {stage}: {told}", file=sys.stderr, flush=True)
            ratios |= {f"{stage} {phase}": wanted[phase] / took[phase] for phase in took}
        return ratios
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def joined(phases: Mapping[str, float]) -> dict[str, float]:
    """Predicted phases as a run counts them: its training has the optimizer's steps in it."""
    found = dict(phases)
    found["train"] += found.pop("step")
    return found


def taken(folder: Path) -> dict[str, float]:
    """Medians over the steps of a stage, the first and the last (which evaluates) left out."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if folder.name == "ppo":
        steps = [row for row in rows if row["step"] > 1]
        return {phase: median([row[f"{phase}_seconds"] for row in steps]) for phase in ("generate", "score", "train")}
    times = [row["seconds"] for row in rows][:-1]
    return {"train": median([after - before for before, after in pairwise(times)])}


def write_data(path: Path) -> None:
    """Prompts, and answers longer than a stage takes, of made words."""
    random_words = random.Random(1)

    def text(count: int, words: Sequence[str]) -> str:
        return " ".join(random_words.choice(words) for _ in range(count))

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random_words.choices(letters, k=random_words.randint(2, 7))) for _ in range(400)]
    keys = {"prompt": 40, "response": 300, "chosen": 300, "rejected": 300}
    lines = [json.dumps({key: text(count, words) for key, count in keys.items()}) for _ in range(240)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
