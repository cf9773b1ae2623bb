"""`start`: from the command line of a 2-rank run to its first step, tiny model, in a folder of its own.

The clock ends when the first line of metrics.jsonl is there: the launcher, two ranks, the made data, the tokenizer
trained on it, the answers of the base model that come before training, and the step. `detail` has when what appeared.
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
SIGNS = {
    "configured": "sft/config.yaml",
    "tokenizer": "tokenizer/tokenizer_config.json",
    "answered": "sft/samples.jsonl",
    "first_step": "sft/metrics.jsonl",
}


def measure(rounds: int) -> Result:
    """The median over `rounds` of the seconds to the first step."""
    runs = [started() for _ in range(rounds)]
    detail = {name: median([run[name] for run in runs]) for name in SIGNS}
    return Result("zero", "start", detail["first_step"], "s", lower_is_better=True, detail={**detail, "wanted": 12.0})


def started() -> dict[str, float]:
    """Seconds from the command until each sign appeared. Raises BenchFailed where the run ends without a step."""
    place = Path(tempfile.mkdtemp(prefix="zerochat-start-"))
    words = ["model=tiny", "ranks=2", "stage=sft", "sft.steps=1", "tracking=none", f"run_dir={place / 'run'}"]
    seen: dict[str, float] = {}
    began = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "train.py", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while len(seen) < len(SIGNS) and run.poll() is None and time.monotonic() - began < LIMIT_SECONDS:
            for name, file in SIGNS.items():
                if name not in seen and (place / "run" / file).exists():
                    seen[name] = time.monotonic() - began
            time.sleep(0.02)
        output, _ = run.communicate(timeout=LIMIT_SECONDS)
    finally:
        run.kill()
        shutil.rmtree(place, ignore_errors=True)
    if len(seen) < len(SIGNS):
        raise BenchFailed(f"the run ended without {', '.join(SIGNS.keys() - seen.keys())}:\n{output[-2000:]}")
    return seen
