"""Disks that are full or blocked and ranks that hang, in runs of real stages.

    python -m tests.campaign faults [--seed S] [--only PART] [--jobs N]

Each case disturbs one run. The run must end with the right exit status and one message that names the cause and the
remedy, or survive the fault. The same command must then end bit for bit like an undisturbed run, and no process may be
left. Faults of disks need root; without it, their cases are counted as not run.
"""

import argparse
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from pipeline.launch.failure import LOG_LEVEL
from tests.campaign import disk_faults, hang_faults
from tests.campaign.scenes import Fault, NotPossible, adopt_orphans, run

MODULES = (hang_faults, disk_faults)


def all_cases() -> list[Fault]:
    """Return the cases of the tables."""
    return [fault for module in MODULES for fault in module.cases()]


def prepare_job() -> None:
    """Prepare the process of a job."""
    os.environ.setdefault(LOG_LEVEL, "ERROR")  # as in ranks; they are forked from a process that has imported torch
    adopt_orphans()


def run_number(cases: Callable[[], list[Fault]], number: int, folder: Path, seed: int) -> tuple[list[str] | str, float]:
    """Run one of the cases. Return its faults, or why it cannot run on this machine, and its seconds."""
    case, began = cases()[number], time.monotonic()
    try:
        return run(case, folder, f"{seed} {case.part} {case.name}"), time.monotonic() - began
    except NotPossible as reason:
        return str(reason), time.monotonic() - began


def main(arguments: list[str]) -> int:
    """Run the cases, print a line for each and a table of counts, and return 1 if a case has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign faults")
    parser.add_argument("--seed", type=int, default=1, help="order of the cases, and their moments")
    parser.add_argument("--only", default="", help="a regular expression for the part and the name of a case")
    parser.add_argument("--jobs", type=int, default=3, help="cases at a time; most wait for a limit of time")
    options = parser.parse_args(arguments)
    return run_cases(all_cases, options.only, options.seed, options.jobs)


def run_cases(cases_of: Callable[[], list[Fault]], only: str, seed: int, count: int) -> int:
    """Run the cases that `only` matches, `count` at a time, and return the exit status. Workers call `cases_of` too."""
    cases = cases_of()
    chosen = [n for n, case in enumerate(cases) if re.search(only, f"{case.part}: {case.name}")]
    random.Random(seed).shuffle(chosen)
    total, failed, skipped = Counter[str](), Counter[str](), Counter[str]()
    began = time.monotonic()
    # Each job has its own process, because the orphans of a case become children of the process that runs the case.
    jobs = ProcessPoolExecutor(count, get_context("spawn"), prepare_job)
    with tempfile.TemporaryDirectory(prefix="zerochat-faults-") as folder, jobs:
        running = {jobs.submit(run_number, cases_of, number, Path(folder), seed): number for number in chosen}
        for done in as_completed(running):
            (faults, seconds), case = done.result(), cases[running[done]]
            if isinstance(faults, str):
                skipped[case.part] += 1
                verdict = f"not run: {faults}"
            else:
                total[case.part] += 1
                failed[case.part] += bool(faults)
                verdict = "; ".join(faults) or "as expected"
            print(f"{case.part}: {case.name} ({seconds:.0f} s): {verdict}", flush=True)
    print(f"\n{'faults':<12}{'cases':>7}{'faults':>8}{'not run':>9}")
    for part in sorted(total | skipped):
        print(f"{part:<12}{total[part]:>7}{failed[part]:>8}{skipped[part]:>9}")
    print(f"{'all':<12}{total.total():>7}{failed.total():>8}{skipped.total():>9}", end="")
    print(f"   seed {seed}, {time.monotonic() - began:.0f} s")
    return int(failed.total() > 0)
