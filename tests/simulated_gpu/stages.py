"""Run stages on a simulated device, one after another in one process.

A fault of a stage raises AssertionError. Each time a stage logs metrics, the functions in which the host waited for the
device are appended to RUN/STAGE/waits.jsonl.
"""

from tests.simulated_gpu import cuda  # before torch  # isort: skip

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

from engine.memory import cost_model, rates
from engine.parallel import dist
from pipeline.config.stages import STAGES
from pipeline.launch.worker import read_config
from pipeline.stages.stage_run import StageRun


def watch_waits() -> None:
    """Make every StageRun write the functions in which the host waited to waits.jsonl at each logged step."""
    log = StageRun.log

    def watched(self: StageRun, step: int, figures: Mapping[str, float], note: str = "") -> None:
        waits = cuda.waits()
        log(self, step, figures, note)
        if dist.is_rank_zero():
            with (self.folder / "waits.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "waits": waits}) + "\n")

    StageRun.log = watched  # type: ignore[method-assign]


def run_stages(folders: list[Path]) -> str:
    """Run the stages of these folders and return their output."""
    watch_waits()
    for sizes in (rates.TOKENS, rates.PARAMETERS, rates.MESSAGE_BYTES):
        sizes["cuda"] = 64  # the speed of Triton's interpreter means nothing, and measuring it takes seconds
    cost_model.PCIE = 1.0  # seconds of a byte: engine=auto must not offload an optimizer because of that speed
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        for folder in folders:
            import_module(f"{STAGES[folder.name].package}.train").run(read_config(folder), folder)
            actual = cuda.faults()
            assert not actual, "\n".join(actual)
    return printed.getvalue()
