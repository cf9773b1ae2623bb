"""One rank of a frozen OPT-2.7B in fp32, ZeRO-3: `write FOLDER` draws and exports it, `load FOLDER` reads it."""

import json
import resource
import sys
import time
from pathlib import Path

import yaml

from benchmarks.zero.tiers.large_steps import MODELS
from engine.parallel import dist, dtensors
from pipeline.config.schema import EngineSettings, ModelConfig
from pipeline.data.tokenizer import train_tokenizer
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.export import export_policy
from pipeline.models.source import resolve


def main(what: str, folder: Path) -> None:
    """Print seconds (of the export, or of building and loading), bytes, and a sum of each parameter's part as JSON."""
    dist.start("whole", device="cpu")
    fields = yaml.safe_load((MODELS / "opt-2.7b.yaml").read_text(encoding="utf-8"))["architecture"]
    model = ModelConfig(name="opt-2.7b", weights="random", architecture=fields)
    source = resolve(model, seed=1, folder=folder if what == "load" else None)
    began = time.monotonic()
    engine = build_policy(source, EngineChoice(EngineSettings(zero_stage=3, dtype="fp32")))
    if what == "write":
        began = time.monotonic()
        export_policy(engine, source, train_tokenizer(["a few words"], 300), folder)
    dist.barrier()
    found = {
        "seconds": time.monotonic() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "shard_bytes": sum(dtensors.local(p.detach()).nbytes for p in engine.module.parameters()),
        "sums": [float(dtensors.local(p.detach()).double().sum()) for p in engine.module.parameters()],
    }
    print(json.dumps(found), flush=True)
    dist.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
