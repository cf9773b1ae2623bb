"""How ranks and stages end: the interface of launcher and worker, exit statuses, causes, and advice on errors."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.messages import in_keys
from pipeline.errors import Stopped, UserError
from pipeline.files import ends_within

FAILURE_PIPE = "ZEROCHAT_FAILURE_PIPE"
LAUNCHER = "ZEROCHAT_LAUNCHER"
ATTEMPT = "ZEROCHAT_ATTEMPT"
STACK = "ZEROCHAT_STACK"  # the descriptor of the file for the Python stacks of a rank, which SIGUSR2 requests
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""PyTorch reads it at its import. At WARNING, a lost store or a lost rank prints C++ stacks before the one message."""
USER_ERROR, CRASHED = 2, 1
RESTART = 3  # the launcher starts the stage again: with smaller micro-batches, or from an earlier step
UNFINISHED = 4  # of a rank that ended with status 0 before the stage was finished
HUNG = 5  # no rank made progress, or a host is lost
INTERRUPTED, STOPPED = 130, 143  # Ctrl-C; SIGTERM and other signals
ENDED_EARLY = (INTERRUPTED, STOPPED)
AGAIN = "run the same command again"
DISK_TIMEOUT = 5.0  # seconds to write what is useful but not necessary
MESSAGE_LENGTH, TRACEBACK_LENGTH = 4000, 12_000
"""Characters of an error that a rank sends. UTF-8 takes at most 4 bytes for each, and a pipe has 65,536 bytes."""
DISK_FULL = ("the disk is full", "free some space")
DISK_FAILED = ("the disk failed", "repair it, or move the run folder to another disk and set run_dir= to it")
NO_THREAD = (
    "no thread can be started, because memory or the number of processes is limited",
    "raise the limit (ulimit -v, ulimit -u), or use fewer ranks",
)
OUT_OF_MEMORY = (
    "out of memory outside of forward and backward (while a model is built, the optimizer steps or a checkpoint is "
    "written), where a smaller micro-batch does not help",
    "choose engine=auto, engine=zero3, or an offload tier (engine=zero3-offload, engine=zero3-nvme)",
)
LIMITS = {
    "/dev/shm/nccl": (
        "NCCL has too little shared memory",
        "start the container with --ipc=host or --shm-size=8g, or enlarge /dev/shm",
    ),
    "CUDA driver error": (  # of the functions for virtual memory, which segments that grow need
        "the driver of the GPU refuses PyTorch's expandable segments",
        "write PYTORCH_ALLOC_CONF=expandable_segments:False in front of the command",
    ),
    "No usable temporary directory": (
        "there is no temporary folder",
        "set the environment variable TMPDIR to a writable folder",
    ),
    "No space left on device": DISK_FULL,
    "Disk quota exceeded": DISK_FULL,
    "Input/output error": DISK_FAILED,
    "Read-only file system": DISK_FAILED,
    "Permission denied": ("no permission", "change the permissions of the file or folder"),
    "Too many open files": ("too many open files", "raise the limit (ulimit -n 4096)"),
    "can't start new thread": NO_THREAD,  # of Python
    "Resource temporarily unavailable": NO_THREAD,  # of C++ and Rust
    "can't allocate memory": OUT_OF_MEMORY,  # of torch's host allocator
    "Cannot allocate memory": OUT_OF_MEMORY,
    "out of memory": OUT_OF_MEMORY,  # of torch on GPUs
}
"""Text of an error that a limit of the machine causes -> what is wrong, and the remedy. The first one counts."""

END_ORDER = {
    "user": 0,
    "stopped": 1,
    "restart": 2,
    "lost": 3,
    "exited": 4,
    "crashed": 5,
    "failed": 6,
    "consequence": 7,
    "fine": 8,
}
"""The ends of ranks by what explains the others: a crash often only shows that another rank is gone."""


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended on this launcher's ranks.

    status: 0 (finished), 1 (crash), 2 (user error), 3 (restart), 5 (hung), 130 or 143 (stopped)
    traceback: the traceback of a crash, or the Python stacks of ranks that hang
    stop_status: the exit status for the launcher if it received a stop signal, else 0. The stage may have finished
        before it reacted to the signal; `status` is 0 in this case.
    order: the value of `END_ORDER`; of several ends, the smallest one is the cause of the others
    time: when a rank crashed, in seconds since 1970
    """

    status: int
    message: str = ""
    traceback: str = ""
    stop_status: int = 0
    order: int = END_ORDER["fine"]
    time: float = 0.0


class StageFailed(Exception):
    """A stage failed, and its message has been printed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def status_of(problem: BaseException) -> int:
    """Return the exit status of a run that ends with an exception."""
    if isinstance(problem, KeyboardInterrupt):
        return STOPPED if isinstance(problem, Stopped) else INTERRUPTED
    if isinstance(problem, StageFailed):
        return problem.status
    return USER_ERROR if isinstance(problem, UserError | OSError) and advise(problem) is not None else CRASHED


def merge_ends(ends: Sequence[StageEnd]) -> StageEnd:
    """Return the end that is the cause of the others, with the stop signal of any of them."""
    cause = min(ends, key=lambda end: (end.order, end.time))
    return replace(cause, stop_status=max(end.stop_status for end in ends))


def advise(problem: BaseException) -> str | None:
    """Return the message and advice for an error that the user can solve; None for a bug in zerochat."""
    if isinstance(problem, UserError):
        return str(problem)
    if isinstance(problem, ValueError | FloatingPointError) and _raised_in_engine(problem):
        return in_keys(str(problem))
    lines = str(problem).splitlines()
    if isinstance(problem, MemoryError):  # each library has its own text, and Python has none
        lines = [" ".join(["out of memory", *lines])]
    for text, (cause, remedy) in LIMITS.items():
        if line := next((line for line in lines if text in line), None):
            return f"{cause} ({line}): {remedy}; then {AGAIN} to resume"
    return None


def save_traceback(end: StageEnd, stage_dir: Path) -> str:
    """Write the traceback of a crash, or the stacks of ranks that hang, to error.txt.

    Return text that follows the error message: file and advice.
    """
    if end.status not in (CRASHED, HUNG):
        return ""
    if stage_dir.name == "plan":  # the folder of stage=plan is temporary
        return " (debug=true shows the traceback)" if end.traceback else ""
    file = stage_dir / "error.txt"
    results = list[bool]()

    def write() -> None:
        results.append(any((stage_dir / "checkpoints").glob("step-*[0-9]")))  # other names are incomplete or damaged
        if end.traceback:
            file.write_text(end.traceback, encoding="utf-8")
            results.append(True)

    if not ends_within(DISK_TIMEOUT, write):
        return f"; the disk of {stage_dir} has not answered for {DISK_TIMEOUT:.0f} s: {AGAIN} to resume when it answers"
    saved, is_written = any(results[:1]), any(results[1:])
    advice = f"{AGAIN} to {'resume from the newest checkpoint' if saved else 'restart the stage'}"
    if not end.traceback:
        return f"; {advice}"
    if not is_written:
        return f"\n{end.traceback}"
    return f" ({file} has the {'traceback' if end.status == CRASHED else 'Python stacks'}; {advice})"


def _raised_in_engine(problem: BaseException) -> bool:
    """Return whether the engine itself raised the error, and not a library that the engine calls."""
    frames = traceback.extract_tb(problem.__traceback__)
    engine = Path(__file__).resolve().parents[2] / "engine"
    return bool(frames) and Path(frames[-1].filename).is_relative_to(engine)
