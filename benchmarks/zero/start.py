"""`start`: seconds from the command line of a run with 2 ranks and the tiny model to the end of its first step.

The time ends when metrics.jsonl appears. It includes the launcher, two ranks, creating the data, training the
tokenizer, the answers of the base model before training, and the step. The detail has the time of each file in `FILES`.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import BenchFailed, median
from benchmarks.record import ROOT, Result

LIMIT_SECONDS = 120.0
FILES = {
    "configured": "sft/config.yaml",
    "tokenizer": "tokenizer/tokenizer_config.json",
    "answered": "sft/samples.jsonl",
    "first_step": "sft/metrics.jsonl",
}


def measure(rounds: int) -> Result:
    """Return the median over `rounds` of the seconds to the first step. Raises BenchFailed."""
    runs = [start_run() for _ in range(rounds)]
    detail = {name: median([run[name] for run in runs]) for name in FILES}
    return Result("zero", "start", detail["first_step"], "s", lower_is_better=True, detail={**detail, "at_most": 12.0})


def start_run() -> dict[str, float]:
    """Return the seconds until each file appeared. Raises BenchFailed if the run ends without a step."""
    folder = Path(tempfile.mkdtemp(prefix="zerochat-start-"))
    overrides = ["model=tiny", "ranks=2", "stage=sft", "sft.steps=1", "tracking=none", f"run_dir={folder / 'run'}"]
    seconds: dict[str, float] = {}
    start = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "train.py", *overrides], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while len(seconds) < len(FILES) and run.poll() is None and time.monotonic() - start < LIMIT_SECONDS:
            for name, file in FILES.items():
                if name not in seconds and (folder / "run" / file).exists():
                    seconds[name] = time.monotonic() - start
            time.sleep(0.02)
        output, _ = run.communicate(timeout=LIMIT_SECONDS)
    finally:
        run.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if len(seconds) < len(FILES):
        raise BenchFailed(f"the run ended without {', '.join(FILES.keys() - seconds.keys())}:\n{output[-2000:]}")
    return seconds
