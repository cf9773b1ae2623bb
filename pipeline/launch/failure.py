"""What launcher and worker agree on: names in the environment, exit statuses, and what helps against an error."""

import traceback
from pathlib import Path

from pipeline.errors import UserError

FAILURE_PIPE = "ZEROCHAT_FAILURE_PIPE"
LAUNCHER = "ZEROCHAT_LAUNCHER"
ATTEMPT = "ZEROCHAT_ATTEMPT"
USER_ERROR, CRASHED = 2, 1
OUT_OF_MEMORY = 3  # of a rank whose stage has to be started again with smaller micro-batches
INTERRUPTED, STOPPED = 130, 143  # by Ctrl-C; by SIGTERM and the like. The same command goes on after both
ENDED_EARLY = (INTERRUPTED, STOPPED)
PIPE_BYTES = 32_000
HOST_FULL = "can't allocate memory"  # what torch's host allocator says, as a plain RuntimeError


def advise(problem: BaseException) -> str | None:
    """What a person can do about an error that is not a fault of the program; None where it is one."""
    if isinstance(problem, UserError):
        return str(problem)
    if isinstance(problem, ValueError | FloatingPointError) and _raised_in_engine(problem):
        return str(problem)
    if isinstance(problem, BrokenPipeError):
        return "nobody reads what is printed here any more, so it ended; the same command goes on"
    text = str(problem)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return f"the disk is full ({text}): make room, then give the same command again; finished work is kept"
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or HOST_FULL in text:
        return (
            "out of memory where no smaller micro-batch helps (a model is built, the optimizer steps, a checkpoint is "
            "written): choose engine=auto, engine=zero3, or an offload tier (engine=zero3-offload, engine=zero3-nvme); "
            f"the same command goes on. {text.partition(chr(10))[0]}"
        )
    return None


def _raised_in_engine(problem: BaseException) -> bool:
    """True where our own engine refused a value (it raises plain ValueErrors), not a library below it."""
    frames = traceback.extract_tb(problem.__traceback__)
    engine = Path(__file__).resolve().parents[2] / "engine"
    return bool(frames) and Path(frames[-1].filename).is_relative_to(engine)
