"""The interface between launcher and worker: environment variables, exit statuses, and advice on errors."""

import traceback
from pathlib import Path

from pipeline.config.messages import in_keys
from pipeline.errors import UserError

FAILURE_PIPE = "ZEROCHAT_FAILURE_PIPE"
LAUNCHER = "ZEROCHAT_LAUNCHER"
ATTEMPT = "ZEROCHAT_ATTEMPT"
USER_ERROR, CRASHED = 2, 1
RESTART = 3  # the launcher starts the stage again: with smaller micro-batches, or from an earlier step
UNFINISHED = 4  # of a rank that ended with status 0 before the stage was finished
INTERRUPTED, STOPPED = 130, 143  # Ctrl-C; SIGTERM and other signals
ENDED_EARLY = (INTERRUPTED, STOPPED)
FINISHED = "finished"  # the kind of the record that a rank sends when it has finished the stage
PIPE_BYTES = 32_000
PIPE_CAPACITY = 65_536  # of a pipe on Linux and macOS
HOST_FULL = "can't allocate memory"  # the message of torch's host allocator, a RuntimeError


def advise(problem: BaseException) -> str | None:
    """Return the message and advice for an error that the user can solve; None for a bug in zerochat."""
    if isinstance(problem, UserError):
        return str(problem)
    if isinstance(problem, ValueError | FloatingPointError) and _raised_in_engine(problem):
        return in_keys(str(problem))
    if isinstance(problem, BrokenPipeError):
        return "the program that reads the output has ended; run the same command again to resume"
    text = str(problem)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return f"the disk is full ({text}): free some space, then run the same command again to resume"
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or HOST_FULL in text:
        return (
            "out of memory outside of forward and backward (while a model is built, the optimizer steps or a "
            "checkpoint is written), where a smaller micro-batch does not help: choose engine=auto, engine=zero3, or "
            "an offload tier (engine=zero3-offload, engine=zero3-nvme); then run the same command again to resume. "
            f"{text.partition(chr(10))[0]}"
        )
    return None


def _raised_in_engine(problem: BaseException) -> bool:
    """Return whether the engine itself raised the error, and not a library that the engine calls."""
    frames = traceback.extract_tb(problem.__traceback__)
    engine = Path(__file__).resolve().parents[2] / "engine"
    return bool(frames) and Path(frames[-1].filename).is_relative_to(engine)
