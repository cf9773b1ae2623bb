"""A checkpoint of more than 10 GB, written and loaded by two processes: what each of them holds at most."""

import shutil
import tempfile
from pathlib import Path

from benchmarks.measure import BenchFailed
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.tiers.disk import folder

WORKER = "benchmarks.zero.tiers.whole_model"


def measure(rounds: int) -> Result:
    """Once, whatever the rounds: memory does not scatter. Raises BenchFailed where other numbers came back."""
    there = Path(tempfile.mkdtemp(dir=folder()))
    try:
        written = run_ranks(WORKER, ["write", str(there / "model")], 2)
        size = sum(file.stat().st_size for file in (there / "model").glob("*.safetensors"))
        loaded = run_ranks(WORKER, ["load", str(there / "model")], 2)
    finally:
        shutil.rmtree(there)
    if any(there["sums"] != here["sums"] for there, here in zip(written, loaded, strict=True)):
        raise BenchFailed("other numbers came back than were written")
    return Result(
        bench="zero",
        case="load_10gb",
        ours=max(each["peak_bytes"] for each in loaded) / 1e9,
        unit="GB peak resident, the larger of two ranks",
        lower_is_better=True,
        detail={
            "checkpoint_gb": size / 1e9,
            "shards_gb": loaded[0]["shard_bytes"] / 1e9,
            "load_seconds": loaded[0]["seconds"],
            "write_peak_gb": max(each["peak_bytes"] for each in written) / 1e9,
            "write_seconds": written[0]["seconds"],
        },
    )
