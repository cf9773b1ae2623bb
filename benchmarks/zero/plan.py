"""Seconds of a step that `stage=plan` predicts, against the seconds of the run that follows.

The cases are all three stages, the tiny model and the shape of OPT-125M, and several layouts. Rows of the data exceed
the longest length and are cut to it, so that steps are as long as a plan assumes. The prediction for PPO uses the mean
length of its prompts.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import median, medians_by_name, run_command
from benchmarks.ranks import run_ranks
from benchmarks.record import ROOT, Result
from engine.parallel import dist
from pipeline.launch.worker import read_config
from pipeline.models.source import resolve
from pipeline.planning.demand import predict_seconds
from pipeline.planning.planner import measure as measure_machine
from pipeline.planning.stage_task import PlanInputs, stage_task
from step3_ppo.models import load_models
from step3_ppo.setup import load_prompts

STAGES = ("sft", "reward", "ppo")
LIMIT_SECONDS = 600.0
TINY = ("model=tiny", "sft.batch_size=16", "reward.batch_size=8", "ppo.batch_size=16", "rollout.max_new_tokens=64")
OPT = (
    "model=opt-125m",
    "model.weights=random",
    "model.tokenizer=train",
    "data=demo",
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
    """Return the share of phases whose prediction is within 30 % of the measured seconds."""
    ratios: dict[str, float] = {}
    for name in SETTINGS:
        runs = [compare(name) for _ in range(rounds)]
        ratios |= {f"{name} {phase}": ratio for phase, ratio in medians_by_name(runs).items()}
    near = [1 / 1.3 <= ratio <= 1.3 for ratio in ratios.values()]
    return Result(
        bench="zero",
        case="plan",
        ours=100 * sum(near) / len(near),
        unit="% of phases within 30 %",
        lower_is_better=False,
        detail={"predicted_by_measured": ratios},
    )


def compare(name: str) -> dict[str, float]:
    """Run one setting; return predicted over measured seconds by stage and phase."""
    ranks, overrides = SETTINGS[name]
    folder = Path(tempfile.mkdtemp(prefix="zerochat-plan-"))
    try:
        data, run_dir = folder / "long.jsonl", folder / "run"
        write_data(data)
        arguments = (*SHARED, *overrides, f"ranks={ranks}", "stage=all", f"data.path={data}", f"run_dir={run_dir}")
        run_command([sys.executable, "train.py", *arguments], folder=ROOT, limit=LIMIT_SECONDS)
        threads = max(1, (os.cpu_count() or 1) // ranks)
        predictions = run_ranks(__name__, [str(run_dir), *STAGES], ranks, threads=threads)[0]
        ratios: dict[str, float] = {}
        for stage in STAGES:
            predicted, measured = phases_of_run(predictions[stage]), measured_seconds(run_dir / stage)
            figures = ", ".join(f"{phase} {predicted[phase]:.3f}/{measured[phase]:.3f}" for phase in measured)
            print(f"{name}, {stage}: {figures}", file=sys.stderr, flush=True)
            ratios |= {f"{stage} {phase}": predicted[phase] / measured[phase] for phase in measured}
        return ratios
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def phases_of_run(predicted: Mapping[str, float]) -> dict[str, float]:
    """Return the predicted phases as a run counts them: "train" includes the optimizer step."""
    phases = dict(predicted)
    phases["train"] += phases.pop("step")
    return phases


def measured_seconds(folder: Path) -> dict[str, float]:
    """Return the median seconds of a stage's steps, without the first step and the last one, which evaluates."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if folder.name == "ppo":
        steps = [row for row in rows if row["step"] > 1]
        return {phase: median([row[f"{phase}_seconds"] for row in steps]) for phase in ("generate", "score", "train")}
    times = [row["seconds"] for row in rows][:-1]
    return {"train": median([after - before for before, after in pairwise(times)])}


def write_data(path: Path) -> None:
    """Write prompts and answers of random words. The answers exceed the longest length of the stages."""
    source = random.Random(1)

    def text(count: int, words: Sequence[str]) -> str:
        return " ".join(source.choice(words) for _ in range(count))

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(source.choices(letters, k=source.randint(2, 7))) for _ in range(400)]
    counts = {"prompt": 40, "response": 300, "chosen": 300, "rejected": 300}
    lines = [json.dumps({key: text(count, words) for key, count in counts.items()}) for _ in range(240)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(run_dir: Path, stages: Sequence[str]) -> None:
    """Predict the seconds by phase of each stage of a run, on as many ranks as the run had; print them as JSON."""
    dist.start("predict")
    print(json.dumps({stage: predict(run_dir, stage) for stage in stages}), flush=True)
    dist.stop()


def predict(run_dir: Path, stage: str) -> dict[str, float]:
    """Return the predicted seconds of a step by phase, at the lengths of the run. Every rank calls."""
    config = read_config(run_dir / stage)
    policy, reward, length = resolve(config.model, config.seed), None, None
    if stage == "ppo":
        sources = load_models(config, run_dir)
        policy, reward = sources.actor, next(iter(sources.rewards), None)
        prompts, _, _ = load_prompts(config, sources)
        length = sum(len(prompt.ids) for prompt in prompts) // len(prompts) + config.rollout.max_new_tokens
    world = dist.world()
    is_cpu = world.device.type == "cpu"
    task = stage_task(config, stage, PlanInputs(policy, reward), ranks=world.size, is_cpu=is_cpu)
    rates = measure_machine(task)
    if length is not None:
        task = replace(task, tokens=length)
    return predict_seconds(task, rates)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
