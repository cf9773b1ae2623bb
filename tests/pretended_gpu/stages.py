"""Stages on a pretended device, one after another in one process: `python -m tests.pretended_gpu.stages RUN/STAGE...`.

Ranks and their number of devices come from the environment; a fault of any stage ends it. Where the host waited for the
device in each step goes into RUN/STAGE/waits.jsonl, a line each time that figures are logged.
"""

from tests.pretended_gpu import cuda  # before torch  # isort: skip

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from engine.parallel import dist
from pipeline.config.stages import STAGES
from pipeline.launch.worker import read_config
from pipeline.stages.stage_run import StageRun


def watch_waits() -> None:
    """Make every StageRun write where the host waited in each step that it logs."""
    log = StageRun.log

    def watched(self: StageRun, step: int, figures: Mapping[str, float]) -> None:
        waits = cuda.waits()
        log(self, step, figures)
        if dist.world().is_rank_zero:
            with (self.folder / "waits.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "waits": waits}) + "\n")

    StageRun.log = watched  # type: ignore[method-assign]


def main(folders: list[Path]) -> None:
    dist.start("stages")
    watch_waits()
    for folder in folders:
        import_module(f"{STAGES[folder.name].package}.train").run(read_config(folder), folder)
        found = cuda.faults()
        assert not found, "\n".join(found)
    dist.stop()


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
