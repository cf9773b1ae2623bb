"""Tokens per second, memory and time by phase of SFT, reward model and PPO: OPT-125M shape, 2 ranks, each ZeRO stage.

Each case reads the metrics.jsonl and summary.json of a `python train.py` run in a temporary folder. Weights are random
and the data is the demo's, so nothing is downloaded. A random model practically never samples the end of text, so each
rollout decodes `NEW_TOKENS` tokens per prompt. There is no peer.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchFailed, in_turn, median, medians_by_name, run_command, spread
from benchmarks.record import ROOT, Result

STAGES = ("sft", "reward", "ppo")
ZERO_STAGES = (0, 1, 2, 3)
CASES = tuple(f"{stage}-zero{zero}" for zero in ZERO_STAGES for stage in STAGES)

RANKS = 2
DTYPE = "bf16"
NEW_TOKENS = 128
STEPS = {"sft": 6, "reward": 6, "ppo": 4}
LIMIT_SECONDS = 1800.0
TRAIN = (sys.executable, "train.py")

SETTINGS = (
    "model=opt-125m",
    "model.weights=random",
    "data=demo",
    "tracking=none",
    f"ranks={RANKS}",
    f"engine.dtype={DTYPE}",
    "sft.batch_size=64",
    "sft.max_length=512",
    "sft.packing=true",
    "sft.micro_batch_tokens=2048",
    "reward.batch_size=32",
    "reward.max_length=512",
    "reward.micro_batch_tokens=2048",
    "ppo.batch_size=8",
    "ppo.update_epochs=1",
    "ppo.minibatches=1",
    "ppo.micro_batch_tokens=2048",
    "rollout.batch_size=8",
    "rollout.max_prompt_tokens=128",
    "evaluation.prompts=2",
    "sft.eval_examples=8",
    "reward.eval_examples=8",
    "ppo.eval_examples=2",
    "sft.save_every=1000",
    "reward.save_every=1000",
    "ppo.save_every=1000",
    "ppo.guard=off",
)


@dataclass(frozen=True)
class StageFigures:
    """The figures of one run of one stage: tokens per second after the first step, peak bytes, seconds by phase."""

    tokens_per_second: float
    host_bytes: int
    device_bytes: int
    seconds_by_phase: Mapping[str, float]
    cpu_seconds_per_second: float


def run(cases: Sequence[str], rounds: int, train: Sequence[str] = TRAIN) -> list[Result]:
    """Measure `cases`. One command runs all cases of a ZeRO stage; the ZeRO stages alternate."""
    selected = {zero: [stage for stage in STAGES if f"{stage}-zero{zero}" in cases] for zero in ZERO_STAGES}
    commands = {str(zero): partial(measure, zero, stages, train) for zero, stages in selected.items() if stages}
    runs = in_turn(commands, rounds)
    return [
        result(stage, zero, [figures[stage] for figures in runs[str(zero)]])
        for zero, stages in selected.items()
        for stage in stages
    ]


def measure(zero: int, stages: Sequence[str], train: Sequence[str]) -> dict[str, StageFigures]:
    """Run `stages` once at a ZeRO stage in a temporary folder; return their figures."""
    folder = Path(tempfile.mkdtemp(prefix="zerochat-bench-"))
    try:
        finished = run_command([*train, *arguments(zero, stages, folder / "run")], folder=ROOT, limit=LIMIT_SECONDS)
        print(f"zero{zero} {' '.join(stages)}: {finished.seconds:.0f} s", file=sys.stderr, flush=True)
        return {stage: read_figures(folder / "run" / stage, finished.cpu_seconds_per_second) for stage in stages}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def arguments(zero: int, stages: Sequence[str], run_dir: Path) -> list[str]:
    """Return the arguments of train.py. PPO needs the two stages before it; unselected ones run one step."""
    stage = "all" if "ppo" in stages or len(stages) > 1 else stages[0]
    steps = [f"{name}.steps={STEPS[name] if name in stages else 1}" for name in STAGES]
    # Without PPO only the evaluation generates. It is not measured, so its answers are short.
    length = f"rollout.max_new_tokens={NEW_TOKENS if 'ppo' in stages else 8}"
    return [*SETTINGS, f"engine=zero{zero}", f"stage={stage}", *steps, length, f"run_dir={run_dir}"]


def read_figures(folder: Path, cpu_seconds_per_second: float) -> StageFigures:
    """Return the figures of a finished stage. Raises BenchFailed if its files are missing or incomplete."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        ranks: list[Mapping[str, Any]] = summary["peak_memory_by_rank"]
        return StageFigures(
            tokens_per_second=steady_rate(rows) or float(summary["tokens_per_second"]),
            host_bytes=max(int(rank["host_bytes"] or 0) for rank in ranks),
            device_bytes=max(int(rank["device_bytes"] or 0) for rank in ranks),
            seconds_by_phase=summary["seconds_by_phase"],
            cpu_seconds_per_second=cpu_seconds_per_second,
        )
    except (OSError, ValueError, KeyError) as problem:
        raise BenchFailed(f"{folder.name} wrote no usable figures ({type(problem).__name__}: {problem})") from problem


def steady_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median tokens per second of the steps. The first step, which includes warm-up, does not count."""
    rates = [row["tokens_per_second"] for row in rows if row.get("step", 0) > 1 and row.get("tokens_per_second")]
    return median(rates) if rates else None


def result(stage: str, zero: int, runs: Sequence[StageFigures]) -> Result:
    """Return the medians over `runs` of one case."""
    rates = [figures.tokens_per_second for figures in runs]
    device = median([figures.device_bytes for figures in runs]) / 2**30
    return Result(
        bench="stages",
        case=f"{stage}-zero{zero}",
        ours=median(rates),
        unit="tokens/s",
        lower_is_better=False,
        detail={
            "ranks": RANKS,
            "dtype": DTYPE,
            "peak_host_gib_a_rank": median([figures.host_bytes for figures in runs]) / 2**30,
            **({"peak_device_gib_a_rank": device} if device else {}),
            "runs": rates,
            "spread": spread(rates),
            "run_cpu_seconds_per_second": median([figures.cpu_seconds_per_second for figures in runs]),
            "seconds_by_phase": medians_by_name([figures.seconds_by_phase for figures in runs]),
        },
    )
