"""Undisturbed runs, with which disturbed ones are compared, and the processes of a run."""

import json
import shutil
from pathlib import Path

from tests.forked_launch import launch
from tests.ranks import Worker

STAGES = ("sft", "reward", "ppo")
STEPS = 4  # two checkpoints
HANG_SECONDS = 8
COMMAND = [
    "model=tiny", "data.demo_examples=400", "tracking=none", "seed=1", "model.architecture.hidden_size=96",
    "model.architecture.intermediate_size=128", "evaluation.prompts=4", "evaluation.best_of=1",
    "evaluation.temperatures=[1.0]", "rollout.max_new_tokens=12", f"engine.hang_seconds={HANG_SECONDS}",
    *(f"{stage}.steps={STEPS}" for stage in STAGES),
    *(f"{stage}.save_every=2" for stage in STAGES), "sft.max_length=160", "reward.max_length=160",
    "rollout.max_prompt_tokens=128", "ppo.update_epochs=1", "ppo.minibatches=1", "ppo.guard=off",
]  # fmt: skip


def command(run_dir: Path, ranks: int) -> list[str]:
    """Return the arguments of a run whose batches the ranks divide."""
    sizes = (f"{stage}.batch_size={max(8, 2 * ranks)}" for stage in STAGES)
    return [*COMMAND, f"run_dir={run_dir}", f"ranks={ranks}", *sizes]


def undisturbed(folder: Path, ranks: int) -> Path:
    """Return a finished run on so many ranks."""
    run_dir = folder / f"undisturbed-{ranks}"
    if not run_dir.exists():
        arguments = [*command(run_dir, ranks), "stage=all"]
        worker = Worker(launch, folder, arguments, {}, environment={"OMP_NUM_THREADS": "1"})
        output, _ = worker.communicate(timeout=900)
        assert worker.returncode == 0, output
    return run_dir


def before(run_dir: Path, stage: str, target: Path) -> Path:
    """Copy a run as it was before a stage."""
    shutil.rmtree(target, ignore_errors=True)
    later = STAGES[STAGES.index(stage) :]
    shutil.copytree(run_dir, target, ignore=lambda folder, names: later if folder == str(run_dir) else ())
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["stages"] = {name: record for name, record in manifest["stages"].items() if name not in later}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def children(process: int) -> list[int]:
    """Return the child processes, the oldest first; none if the process has ended."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
