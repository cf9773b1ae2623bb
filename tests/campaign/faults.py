"""Faults of processes, disks, networks, memory, clocks and services under runs of real stages.

    python -m tests.campaign faults [--seed S] [--only PART]

Each case disturbs one run. The run must end with the right exit status and one message that names the cause and the
remedy, or survive the fault. The same command must then end bit for bit like an undisturbed run, and no process may be
left. Faults of disks, networks and cgroups need root; without it, their cases are counted as not run.
"""

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.campaign import disk_faults, hang_faults, machine_faults, service_faults
from tests.campaign.scenes import Fault, NotPossible, adopt_orphans, run

MODULES = (hang_faults, disk_faults, machine_faults, service_faults)


def all_cases() -> list[Fault]:
    """Return the cases of the tables."""
    return [fault for module in MODULES for fault in module.cases()]


def main(arguments: list[str]) -> int:
    """Run the cases, print a line for each and a table of counts, and return 1 if a case has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign faults")
    parser.add_argument("--seed", type=int, default=1, help="order of the cases, and their moments")
    parser.add_argument("--only", default="", help="a regular expression for the part and the name of a case")
    parser.add_argument("--share", default="1/1", help="N/M: only the N-th of M shares of the cases")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases() if re.search(options.only, f"{case.part}: {case.name}")]
    random.Random(options.seed).shuffle(cases)
    number, count = map(int, options.share.split("/"))
    total, failed, skipped = Counter[str](), Counter[str](), Counter[str]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerochat-faults-") as folder, adopt_orphans():
        for case in cases[number - 1 :: count]:
            started = time.monotonic()
            try:
                faults = run(case, Path(folder), f"{options.seed} {case.part} {case.name}")
            except NotPossible as reason:
                skipped[case.part] += 1
                print(f"{case.part}: {case.name}: not run: {reason}", flush=True)
                continue
            total[case.part] += 1
            failed[case.part] += bool(faults)
            seconds = time.monotonic() - started
            print(f"{case.part}: {case.name} ({seconds:.0f} s): {'; '.join(faults) or 'as expected'}", flush=True)
    print(f"\n{'faults':<12}{'cases':>7}{'faults':>8}{'not run':>9}")
    for part in sorted(total | skipped):
        print(f"{part:<12}{total[part]:>7}{failed[part]:>8}{skipped[part]:>9}")
    print(f"{'all':<12}{total.total():>7}{failed.total():>8}{skipped.total():>9}", end="")
    print(f"   seed {options.seed}, {time.monotonic() - began:.0f} s")
    return int(failed.total() > 0)
