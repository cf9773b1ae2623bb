"""Peak memory of two ranks that write and load a checkpoint of more than 10 GB: a frozen OPT-2.7B in fp32, ZeRO-3."""

import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import BenchFailed
from benchmarks.ranks import run_ranks
from benchmarks.record import Result
from benchmarks.zero.large_models import model_config
from benchmarks.zero.nvme import nvme_folder
from engine.parallel import dist, dtensors
from pipeline.config.schema import EngineSettings
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.export import export_policy
from pipeline.models.source import resolve


def measure(rounds: int) -> Result:
    """Return the larger rank's peak in GB. Runs once: the memory does not vary.

    Raises BenchFailed if the loaded parameters differ from the written ones.
    """
    folder = Path(tempfile.mkdtemp(dir=nvme_folder()))
    try:
        written = run_ranks(__name__, ["write", str(folder / "model")], 2)
        size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        loaded = run_ranks(__name__, ["load", str(folder / "model")], 2)
    finally:
        shutil.rmtree(folder)
    if any(before["sums"] != after["sums"] for before, after in zip(written, loaded, strict=True)):
        raise BenchFailed("the sums of the loaded parameters differ from those of the written parameters")
    return Result(
        bench="zero",
        case="load_10gb",
        ours=max(rank["peak_bytes"] for rank in loaded) / 1e9,
        unit="GB peak resident, the larger of two ranks",
        lower_is_better=True,
        detail={
            "checkpoint_gb": size / 1e9,
            "shards_gb": loaded[0]["shard_bytes"] / 1e9,
            "load_seconds": loaded[0]["seconds"],
            "write_peak_gb": max(rank["peak_bytes"] for rank in written) / 1e9,
            "write_seconds": written[0]["seconds"],
        },
    )


def main(action: str, folder: Path) -> None:
    """Write or load the model on one rank. Print seconds, bytes and the sum of each parameter's shard as JSON.

    The seconds of "write" are those of the export; the seconds of "load" include building the engine.
    """
    dist.start("checkpoint", device="cpu")
    source = resolve(model_config("opt-2.7b"), seed=1, folder=folder if action == "load" else None)
    start = time.monotonic()
    engine = build_policy(source, EngineChoice(EngineSettings(zero_stage=3, dtype="fp32")))
    if action == "write":
        start = time.monotonic()
        export_policy(engine, source, train_tokenizer(["a few words"], 300), folder)
    dist.barrier()
    shards = [dtensors.local(p.detach()) for p in engine.module.parameters()]
    figures = {
        "seconds": time.monotonic() - start,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "shard_bytes": sum(shard.nbytes for shard in shards),
        "sums": [float(shard.double().sum()) for shard in shards],
    }
    print(json.dumps(figures), flush=True)
    dist.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
