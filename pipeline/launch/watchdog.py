"""Find out that a stage hangs, name the rank that the others wait for, and print what a long step does.

Each launcher reads the rows of its ranks (`pipeline/progress.py`) and counts the seconds without a change. The first
launcher gets the results of all launchers. A stage hangs if no rank has made progress for longer than the largest
limit of the ranks, or, while a rank is stopped (SIGSTOP), for longer than `STOPPED_LIMIT`.

A rank that hangs soon stops all others, because they wait for it in a collective. The rank to name is therefore the
one that is stopped, or that does not wait in a collective, or that waits in another collective than the others.
"""

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config.messages import format_time
from pipeline.progress import Moment, Row

SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines about a long step."""
STOPPED_LIMIT = 60.0
"""Seconds that a process may be stopped, or a launcher may be silent, unless `engine.hang_seconds` is set."""
STACK_TIMEOUT = 3.0
"""Seconds in which a rank writes its Python stack after SIGUSR2. A rank that does not run writes nothing."""
LONGEST_PAUSE = 1.0
"""Seconds that count between two looks. More have passed if this launcher itself was stopped."""
COLLECTIVE_FILES = ("torch/distributed/", "engine/parallel/")
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True)
class RankState(Moment):
    """What one rank does, as its launcher sees it: the content of its row, and the process.

    idle: seconds without a change of the row
    is_stopped: whether the process is stopped by a signal
    stack: the Python stack of the main thread, the innermost call first; "" if the rank is not idle or gives none
    """

    rank: int
    host: str
    process: int
    idle: float
    is_stopped: bool = False
    stack: str = ""

    @property
    def waits(self) -> bool:
        """Whether the rank waits in a collective; an asynchronous one shows only in the stack."""
        innermost = FRAME.match(self.stack)
        in_torch = innermost is not None and any(part in innermost["file"] for part in COLLECTIVE_FILES)
        return not self.is_stopped and (self.inside or in_torch)

    def describe(self) -> str:
        """Return rank, host and place of the rank, in one line."""
        text = f"rank {self.rank} (host {self.host}, process {self.process}; {self.place or 'no phase'}"
        if self.collective:
            text += f"; {'in' if self.inside else 'after'} collective {self.number}, {self.collective}"
        return f"{text})"

    @property
    def place(self) -> str:
        """The phase and the step; "" between two phases outside of a step."""
        places = [f"phase {self.phase}"] if self.phase else []
        return ", ".join([*places, f"step {self.step}"] if self.step else places)


class LongSteps:
    """Prints lines about the first rank during a long step, and during long work before or after the steps.

    The launcher prints them, because a rank that imports libraries or computes one long micro-batch cannot.
    """

    def __init__(self, stage: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stage, self._clock = stage, clock
        self._step = 0
        self._began = self._printed = clock()

    def show(self, state: RankState) -> None:
        """Print the phase and the time of a step every `SECONDS_BETWEEN_LINES`. The stage prints the end of a step."""
        now = self._clock()
        if state.step != self._step:
            self._step, self._began, self._printed = state.step, now, now
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            texts = filter(None, (state.place, f"{format_time(now - self._began)} so far"))
            print(f"{self._stage}: {', '.join(texts)}", file=sys.stderr, flush=True)


class RankWatch:
    """The row and the stack of one rank, on its own launcher."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.row = Row()
        self._nccl_pipe = Path(tempfile.gettempdir()) / f"zerochat-{os.getpid()}-{rank}.pipe"
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the row)
        self._moment: Moment | None = None
        self._idle, self._looked = 0.0, time.monotonic()
        self._requested = False

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors that the rank inherits: of its row, and of the file for its stack."""
        return self.row.descriptor, self._stack.fileno()

    def flight_recorder(self, stage_dir: Path) -> dict[str, str]:
        """Return the environment that makes NCCL record its newest collectives.

        NCCL writes them to STAGE/nccl-rank-N after a timeout, or when this launcher writes to the pipe, which NCCL
        makes. `torchfrtrace` of PyTorch reads the files.
        """
        return {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": str(stage_dir.resolve() / "nccl-rank-"),
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._nccl_pipe).removesuffix(f"{self.rank}.pipe"),
        }

    def look(self, process: int) -> RankState:
        """Return what the rank does now. A rank that was idle for its limit is requested to write its stack."""
        moment, now = self.row.read(), time.monotonic()
        passed, self._looked = min(now - self._looked, LONGEST_PAUSE), now
        if moment != self._moment:
            self._moment, self._idle, self._requested = moment, 0.0, False
        elif moment.moves:
            self._idle += passed
        is_stopped = _is_stopped(process)
        if not self._requested and self._idle > moment.limit and not is_stopped:
            self._request_stack(process)
        stack = self._read_stack() if self._requested else ""
        return RankState(
            **asdict(moment),
            rank=self.rank,
            host=socket.gethostname(),
            process=process,
            idle=self._idle,
            is_stopped=is_stopped,
            stack=stack,
        )

    def _request_stack(self, process: int) -> None:
        """Make the rank write its stack. `worker.py` has set the handler before the first change of the row."""
        os.ftruncate(self._stack.fileno(), 0)
        os.lseek(self._stack.fileno(), 0, os.SEEK_SET)  # the rank shares the position
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR2)
        with suppress(OSError):  # without NCCL there is no pipe
            pipe = os.open(self._nccl_pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"1")
            os.close(pipe)
        self._requested = True

    def _read_stack(self) -> str:
        size = os.fstat(self._stack.fileno()).st_size
        return frames(os.pread(self._stack.fileno(), size, 0).decode(errors="replace"))

    def close(self) -> None:
        self.row.close()
        self._stack.close()
        self._nccl_pipe.unlink(missing_ok=True)


def frames(dump: str) -> str:
    """Return the frames of a stack that faulthandler wrote, the innermost call first, without the line before them."""
    return dump.partition("\n")[2].rstrip()


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal."""
    import psutil  # here, because the commands report missing packages themselves

    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def is_hung(states: Sequence[RankState], hang_seconds: float | None) -> bool:
    """Return whether no rank has made progress for too long. Ranks that have ended are not among the states."""
    if not states:
        return False
    limit = max(state.limit for state in states)
    if any(state.is_stopped for state in states):
        limit = min(limit, stopped_limit(hang_seconds))
    return min(state.idle for state in states) > limit + STACK_TIMEOUT


def stopped_limit(hang_seconds: float | None) -> float:
    """Return the seconds that a process may be stopped, or a launcher may be silent, in any phase."""
    return STOPPED_LIMIT if hang_seconds is None else hang_seconds


def report(states: Sequence[RankState]) -> str:
    """Return one line about a stage that hangs: the ranks to blame, what they do, and what the others do."""
    idle = f"no rank has made progress for {min(state.idle for state in states):.0f} s"
    stopped = [state for state in states if state.is_stopped]
    busy = [state for state in states if not state.waits]
    if stopped:
        return f"{idle}: {_list(stopped)} is stopped by a signal (SIGSTOP); continue it with SIGCONT, or leave it"
    if busy and len(busy) < len(states):
        return f"{idle}: {_list(busy)} does not reach the collective of the other ranks{_where(busy[0])}"
    if busy:
        return f"{idle}: {_list(busy)}{_where(busy[0])}"
    if len({(state.number, state.collective) for state in states}) > 1:
        return f"{idle}: the ranks wait in different collectives: {_list(states)}"
    # NCCL's collectives run after the host has called them. The host waits in the first one whose result it reads.
    others = "On GPUs, an earlier collective may be the cause: NCCL's records in nccl-rank-N show it"
    cut = "all ranks wait in the same collective, so a connection between hosts is cut"
    if len({state.host for state in states}) == 1:
        cut = "all ranks wait in the same collective: if they run on GPUs, set NCCL_P2P_DISABLE=1"
    return f"{idle}: {cut}: {_list(states)}. {others}"


def stacks(states: Sequence[RankState]) -> str:
    """Return the Python stacks of all ranks, for a file."""
    missing = "  no stack: the process does not run Python code"
    return "".join(f"{state.describe()}\n{state.stack or missing}\n\n" for state in states)


def _list(states: Sequence[RankState]) -> str:
    return ", ".join(state.describe() for state in states)


def _where(state: RankState) -> str:
    """Return the innermost call that is not in the standard library or an installed package."""
    frames = [FRAME.match(line) for line in state.stack.splitlines()]
    own = [frame for frame in frames if frame is not None and "/lib/python" not in frame["file"]]
    chosen = next(iter(own or [frame for frame in frames if frame is not None]), None)
    return "" if chosen is None else f"; it runs {chosen['function']} ({chosen['file']}, line {chosen['line']})"
