"""One fault in one run: the command, the moments to wait for, and the comparison with an undisturbed run.

A fault is a function of a `Scene`. It starts the command, disturbs it, waits for its end, and repairs what it broke.
Then `judge` decides whether the end was clear, resumes the run, and compares the results bit for bit.
"""

import fcntl
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.progress import Moment, Row
from tests.campaign.undisturbed import STEPS, before, children, command, undisturbed
from tests.forked_launch import launch
from tests.ranks import Worker
from tests.test_resume import assert_equal_runs

SECONDS = 400  # for one command, on a busy machine; most take ten
LONGEST_MESSAGE = 2500
CLEAR = r"[Rr]un the same command again|restart \d of \d|Correct the function|set run_dir="
"""What an error message advises."""


class NotPossible(Exception):
    """This machine lacks what a fault needs, such as the right to mount a disk."""


class Missed(NotPossible):
    """The run ended before its fault. The case may be repeated."""


ATTEMPTS = 5  # of a case that misses its moment


@dataclass(frozen=True)
class Fault:
    """One case.

    part, name: its place in the report
    act: starts the command, disturbs it and waits for its end
    says: a regular expression that the output must match
    statuses: the exit statuses that are right
    keys: arguments of the command, also of the undisturbed run
    own_keys: arguments of the disturbed run only
    function: the source of f.py in the current folder of the command; "" for none. All such functions give the same
        scores to the same answers while they work.
    """

    part: str
    name: str
    act: "Callable[[Scene], None]"
    says: str = ""
    statuses: tuple[int, ...] = (2,)
    stage: str = "ppo"
    ranks: int = 1
    keys: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    function: str = ""


class Scene:
    """The run that a fault disturbs. `folder` is the current folder of the command."""

    def __init__(self, fault: Fault, whole: Path, folder: Path, seed: str) -> None:
        self.fault, self.whole, self.folder = fault, whole, folder
        self.rng = random.Random(seed)
        self.run_dir = folder / "run"
        self.worker: Worker | None = None
        self.status, self.output = 0, ""
        self.resumed, self.resume_status, self.resume_output = False, 0, ""

    def arguments(self) -> list[str]:
        """Return the arguments of the command."""
        return [*command(self.run_dir, self.fault.ranks), f"stage={self.fault.stage}", *self.fault.keys]

    def copy(self) -> None:
        """Copy the run as it was before the stage, unless it is there."""
        if not self.run_dir.exists():
            before(self.whole, self.fault.stage, self.run_dir)

    def start(self) -> Worker:
        """Start the command."""
        self.copy()
        arguments = [*self.arguments(), *self.fault.own_keys]
        self.worker = Worker(launch, self.folder, arguments, {}, environment={"OMP_NUM_THREADS": "1"})
        return self.worker

    def end(self) -> None:
        """Wait for the end of the command."""
        assert self.worker is not None
        output, _ = self.worker.communicate(timeout=SECONDS)
        self.status, self.output = self.worker.returncode or 0, output

    @property
    def running(self) -> bool:
        return self.worker is not None and self.worker.poll() is None

    def complete(self) -> None:
        """Start the same command again without a fault, if the disturbed one failed."""
        if self.status and not self.resumed:
            output, status = self.output, self.status
            self.resumed = True
            self.start()
            self.end()
            self.resume_status, self.resume_output = self.status, self.output
            self.output, self.status = output, status

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in rank order."""
        assert self.worker is not None
        return children(self.worker.pid)

    def lines(self) -> int:
        """Return the number of steps that are logged."""
        log = self.run_dir / self.fault.stage / "metrics.jsonl"
        return len(log.read_bytes().splitlines()) if log.exists() else 0

    def reach(self, line: int) -> None:
        """Wait until so many steps are logged, and all ranks run. Raises Missed as `reach_any` does."""
        while self.running:
            lines = self.lines()
            if lines >= line and len(self.ranks()) == self.fault.ranks:
                break
            time.sleep(0.01)
        self.must_have_steps_left()

    def reach_any(self) -> None:
        """Wait for a random moment of the steps. Raises Missed if the last step has passed and the run must fail."""
        self.reach(self.rng.randint(0, STEPS - 2))
        time.sleep(self.rng.random() * 0.3)
        self.must_have_steps_left()

    def must_have_steps_left(self) -> None:
        if 0 not in self.fault.statuses and self.lines() >= STEPS:
            raise Missed("the last step was logged before the fault")

    def stop_in(self, rank: int, phase: str, *, first_step: int = 1) -> int:
        """Stop a rank (SIGSTOP) inside a phase of a step, and return its process id."""
        row, process, opened = None, 0, 0
        while self.running:
            ranks = self.ranks()
            if len(ranks) == self.fault.ranks and ranks[rank] != opened:
                row = row_of(ranks[rank])
                opened, process = (ranks[rank], ranks[rank]) if row else (0, 0)
            if row is None or not _is_in(row.read(), phase, first_step):
                time.sleep(0.0002)
                continue
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.02)
            if _is_in(row.read(), phase, first_step):
                return process
            os.kill(process, signal.SIGCONT)
        raise Missed(f"the run ended before a look found rank {rank} in phase {phase}")


def _is_in(moment: Moment, phase: str, first_step: int) -> bool:
    return moment.phase == phase and moment.step >= first_step


def row_of(process: int) -> Row | None:
    """Return the row of memory in which a rank publishes its progress; None before it has one.

    A rank that was forked a moment ago still has the rows of other ranks, too.
    """
    with suppress(OSError):
        links = [*Path(f"/proc/{process}/fd").iterdir()]
        rows = [link for link in links if "memfd:zerochat-progress" in os.readlink(link)]
        if len({os.stat(link).st_ino for link in rows}) == 1:  # a mapped row has two descriptors
            return Row(os.open(rows[0], os.O_RDWR))
    return None


def undisturbed_of(fault: Fault, folder: Path) -> Path:
    """Return a finished run with the keys of a fault."""
    with locked(folder / f"{fault.ranks}.lock"):
        base = undisturbed(folder, fault.ranks)
    if not fault.keys and not fault.function:
        return base
    name = "-".join(re.sub(r"\W+", "", key) for key in fault.keys)[-100:]
    place = folder / f"undisturbed-{fault.stage}-{fault.ranks}-{name}"
    with locked(place.with_suffix(".lock")):
        _make_undisturbed(fault, base, place)
    return place / "run"


def _make_undisturbed(fault: Fault, base: Path, place: Path) -> None:
    if not place.exists():
        plain = Fault(fault.part, fault.name, fault.act, stage=fault.stage, ranks=fault.ranks, keys=fault.keys,
                      function=fault.function)  # fmt: skip
        place.mkdir()
        scene = Scene(plain, base, place, "")
        write_function(scene)
        scene.start()
        scene.end()
        if scene.status:
            shutil.rmtree(place)
            raise AssertionError(f"the undisturbed run failed: {scene.output}")


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let one job at a time make what several jobs need."""
    with open(file, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_function(scene: Scene) -> None:
    if scene.fault.function:
        (scene.folder / "f.py").write_text(scene.fault.function)


def judge(scene: Scene) -> list[str]:
    """Return what is wrong with the end of a disturbed run, and with its results after a resume."""
    fault, faults = scene.fault, []
    messages = [line for line in scene.output.splitlines() if line.startswith("error: ")]
    if scene.status not in fault.statuses:
        faults.append(f"exit status {scene.status}, not {' or '.join(map(str, fault.statuses))}")
    if "Traceback (most recent call last)" in scene.output or re.search(
        r"^(terminate called|frame #\d+:)", scene.output, re.M
    ):
        faults.append("a traceback")
    restarts = len(re.findall(r"restart \d of \d", scene.output))
    if scene.status >= 0 and len(messages) != restarts + (scene.status != 0):
        faults.append(f"{len(messages)} error messages")
    if not re.search(fault.says, scene.output, re.DOTALL):
        faults.append(f"does not say {fault.says!r}")
    if scene.status > 0 and not re.search(CLEAR, scene.output):
        faults.append("no advice")
    if any(len(line) > LONGEST_MESSAGE for line in messages):
        faults.append("a long message")
    scene.complete()
    if scene.resume_status:
        return [*faults, f"does not resume: {scene.resume_output[-1500:]} after {scene.output[-1500:]}"]
    try:
        assert_equal_runs(scene.whole, scene.run_dir, fault.stage, fault.name)
    except (AssertionError, OSError) as difference:
        faults.append(f"lost: {str(difference)[:600]}")
    return [*faults[:-1], f"{faults[-1]}: {scene.output[-1500:]}"] if faults else []


def run(fault: Fault, folder: Path, seed: str) -> list[str]:
    """Run a case and return its faults. Raises NotPossible."""
    for attempt in range(ATTEMPTS):
        try:
            return _attempt(fault, folder, f"{seed} {attempt}")
        except Missed:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _attempt(fault: Fault, folder: Path, seed: str) -> list[str]:
    place = folder / f"disturbed-{os.getpid()}"
    try:
        whole = undisturbed_of(fault, folder)
        place.mkdir()
        scene = Scene(fault, whole, place, seed)
        write_function(scene)
        try:
            fault.act(scene)
            return [*judge(scene), *leaked()]
        finally:
            if scene.running and scene.worker is not None:
                scene.worker.send_signal(signal.SIGKILL)
    except AssertionError as problem:
        return [f"{str(problem)[-2500:]}", *leaked()]
    finally:
        leaked()
        shutil.rmtree(place, ignore_errors=True)


def leaked() -> list[str]:
    """Kill the processes that a command left, which are children of this process (`adopt_orphans`)."""
    left = []
    for _ in range(40):
        left = [pid for pid in children(os.getpid()) if not is_fork_server(pid)]
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        if not left:
            return []
        time.sleep(0.05)
    names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200] for pid in left]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"processes are left: {names}"]


def is_fork_server(process: int) -> bool:
    from tests.ranks import fork_servers

    return process in [fork_server.pid for fork_server in fork_servers]


def adopt_orphans() -> None:
    """Make this process the parent of processes that outlive their launcher."""
    import ctypes

    subreaper = 36
    ctypes.CDLL(None).prctl(subreaper, 1)
