"""Stages on a pretended device, one after another in one process.

A fault of any stage ends it. Where the host waited for the device in each step goes into RUN/STAGE/waits.jsonl, a line
each time that figures are logged.
"""

from tests.pretended_gpu import cuda  # before torch  # isort: skip

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

from engine.parallel import dist
from pipeline.config.stages import STAGES
from pipeline.launch.worker import read_config
from pipeline.stages.stage_run import StageRun


def watch_waits() -> None:
    """Make every StageRun write where the host waited in each step that it logs."""
    log = StageRun.log

    def watched(self: StageRun, step: int, figures: Mapping[str, float], note: str = "") -> None:
        waits = cuda.waits()
        log(self, step, figures, note)
        if dist.world().is_rank_zero:
            with (self.folder / "waits.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "waits": waits}) + "\n")

    StageRun.log = watched  # type: ignore[method-assign]


def run_stages(folders: list[Path]) -> str:
    """Run the stages of these folders, and return what was printed."""
    watch_waits()
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        for folder in folders:
            import_module(f"{STAGES[folder.name].package}.train").run(read_config(folder), folder)
            found = cuda.faults()
            assert not found, "\n".join(found)
    return printed.getvalue()
