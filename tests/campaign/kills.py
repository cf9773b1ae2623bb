"""Kill or stop processes of a run at random moments. The run must end bit for bit like an undisturbed one.

    python -m tests.campaign kills --count 30 --seed 1 [--ranks 8]

A case is a function of the seed and its number: stage, number of ranks, victim, restarts and moment. Victims are one
rank (SIGKILL, or SIGSTOP, which the watchdog must find), the launcher, or all processes. Outcomes: bit-equal, lost
(the results differ or the run does not end), or silent (a killed rank without exactly one line that names it).
"""

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.forked_launch import launch
from tests.ranks import Worker
from tests.test_resume import assert_equal_runs

STAGES = ("sft", "reward", "ppo")
STEPS = 6
HANG_SECONDS = 8
COMMAND = [
    "model=tiny", "data.demo_examples=400", "tracking=none", "seed=1", "model.architecture.hidden_size=96",
    "model.architecture.intermediate_size=128", "evaluation.prompts=4", "evaluation.best_of=1",
    "evaluation.temperatures=[1.0]", "rollout.max_new_tokens=12", f"engine.hang_seconds={HANG_SECONDS}",
    *(f"{stage}.steps={STEPS}" for stage in STAGES),
    *(f"{stage}.save_every=2" for stage in STAGES), "sft.max_length=160", "reward.max_length=160",
    "rollout.max_prompt_tokens=128", "ppo.update_epochs=2", "ppo.guard=off",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kill: after metrics line `line`, and `delay` seconds later."""

    stage: str
    ranks: int
    victim: str
    rank: int
    restarts: int
    line: int
    delay: float

    def named_in(self, line: str) -> bool:
        """Return whether a line names the rank that got the signal."""
        return f"rank {self.rank} " in line


def draw(seed: int, number: int, numbers_of_ranks: Sequence[int]) -> Case:
    """Return the case with a number."""
    rng = random.Random(f"{seed} {number}")
    ranks, victim = rng.choice(numbers_of_ranks), rng.choice(("kill", "kill", "stop", "launcher", "all"))
    line, delay = rng.randint(0, STEPS - 2), rng.random() * 0.5
    return Case(rng.choice(STAGES), ranks, victim, rng.randrange(ranks), rng.choice((0, 2)), line, delay)


def start(run_dir: Path, ranks: int, *more: str) -> Worker:
    """Start a run whose batches the ranks divide."""
    sizes = [f"{stage}.batch_size={max(8, 2 * ranks)}" for stage in STAGES]
    arguments = [*COMMAND, f"run_dir={run_dir}", f"ranks={ranks}", *sizes, *more]
    return Worker(launch, run_dir.parent, arguments, {}, environment={"OMP_NUM_THREADS": "1"})


def undisturbed(folder: Path, ranks: int, *more: str) -> Path:
    """Return a finished run on so many ranks. `more` are further arguments of its command."""
    run_dir = folder / f"undisturbed-{ranks}"
    if not run_dir.exists():
        worker = start(run_dir, ranks, "stage=all", *more)
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


def disturb(worker: Worker, case: Case, run_dir: Path) -> bool:
    """Wait for the moment of the case and send the signal. Return False if the run ended before."""
    log = run_dir / case.stage / "metrics.jsonl"
    while worker.poll() is None:
        lines = len(log.read_bytes().splitlines()) if log.exists() else 0
        if len(children(worker.pid)) == case.ranks and lines >= case.line:
            break
        time.sleep(0.01)
    time.sleep(case.delay)
    ranks = children(worker.pid)
    if worker.poll() is not None or len(ranks) < case.ranks:
        return False
    chosen = {"launcher": [worker.pid], "all": [worker.pid, *ranks]}.get(case.victim, [ranks[case.rank]])
    for process in chosen:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP if case.victim == "stop" else signal.SIGKILL)
    return True


def children(process: int) -> list[int]:
    """Return the child processes, the oldest first; none if the process has ended."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def run(case: Case, folder: Path) -> str:
    """Run a case and return its outcome."""
    whole = undisturbed(folder, case.ranks)
    run_dir = before(whole, case.stage, folder / "disturbed")
    keys = f"stage={case.stage}", f"restarts={case.restarts}"
    worker = start(run_dir, case.ranks, *keys)
    hit = disturb(worker, case, run_dir)
    output, _ = worker.communicate()
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    if "Traceback" in output or (worker.returncode > 0 and [case.named_in(line) for line in errors] != [True]):
        return f"silent: {output[-1000:]}"
    if worker.returncode != 0:
        worker = start(run_dir, case.ranks, *keys)
        output, _ = worker.communicate()
        if worker.returncode != 0:
            return f"lost: {output[-1000:]}"
    try:
        assert_equal_runs(whole, run_dir, case.stage, str(case))
    except AssertionError as difference:
        return f"lost: {str(difference)[:1000]}"
    return "bit-equal" if hit else "bit-equal (ended before the signal)"


def main(arguments: list[str]) -> int:
    """Run the cases, print a line for each and the counts, and return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign kills")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 2], help="numbers of ranks to draw from")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no case later than this")
    options = parser.parse_args(arguments)
    outcomes, began = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerochat-kills-") as folder:
        for number in range(options.first, options.first + options.count):
            if time.monotonic() - began > 60 * options.minutes:
                break
            case = draw(options.seed, number, options.ranks)
            outcome = run(case, Path(folder))
            outcomes[outcome.partition(":")[0]] += 1
            print(f"{number}: {case}: {outcome}", flush=True)
    print(f"seed {options.seed}: {outcomes.total()} cases: {dict(outcomes)}")
    return int(any(name.startswith(("lost", "silent")) for name in outcomes))
