"""Run one stage as one rank: read its config.yaml, run it, and return an exit status.

A rank sends an error to the launcher as one JSON object through a pipe. The launcher then prints one message, even if
many ranks fail or the disk is full.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from pipeline import progress
from pipeline.config.messages import in_keys
from pipeline.config.schema import RunConfig
from pipeline.errors import (
    STOP_SIGNALS,
    RestartStage,
    UserError,
    handle_signals,
    print_any_text,
    printable,
    raise_stopped,
    stop_without_reader,
)
from pipeline.files import load_yaml
from pipeline.launch.failure import (
    ATTEMPT,
    CRASHED,
    FAILURE_PIPE,
    INTERRUPTED,
    LAUNCHER,
    MESSAGE_LENGTH,
    RESTART,
    STACK,
    TRACEBACK_LENGTH,
    USER_ERROR,
    advise,
)
from pipeline.launch.ranks import may_have_gpus

WITHOUT_GPU = (
    "warning: {stage} runs on CPUs, because this PyTorch cannot use a GPU of this machine: "
    "docs/guides/troubleshooting.md (CUDA is not found) finds the cause; CUDA_VISIBLE_DEVICES= in front of the command "
    "selects CPUs without this warning"
)


def stage_main(stage: str, module: str) -> None:
    """Run as the `__main__` of a stage. This function never returns.

    With the arguments `--worker RUN_DIR` the process is one rank. With all other arguments it is `train.py` with this
    stage. `module` is the name of a module with `run(config: RunConfig, stage_dir: Path)`, which runs the stage inside
    the process group. Only the worker imports this module, so that `--help` remains fast.
    """
    arguments = sys.argv[1:]
    if arguments[:1] == ["--worker"] and len(arguments) == 2:
        run_worker(stage, Path(arguments[1]), module)
    from pipeline.launch.command import main

    sys.exit(main(arguments, stage=stage))


def run_worker(stage: str, run_dir: Path, module: str) -> None:
    """Run a stage as one rank, and end the process with its exit status."""
    print_any_text()
    atexit.register(_end_process, 0)  # registered first, runs last
    _end_with_launcher()
    write_stack_on_request()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set SIGINT to ignored
    try:
        with handle_signals(raise_stopped):
            stop_without_reader()
            _check_folder(run_dir / stage)
            config = read_config(run_dir / stage)
            if not config.debug:  # these warnings of libraries address programmers
                warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|triton)\.")
                warnings.filterwarnings("ignore", category=FutureWarning)
                warnings.filterwarnings("default", message="CUDA initialization")  # why PyTorch cannot use a GPU
            gc.disable()  # the imports make 600,000 objects: a collection would only visit them
            from engine import distributed

            run_stage = importlib.import_module(module).run
            gc.freeze()  # later collections skip these objects
            gc.enable()
            distributed.observe_collectives(progress.own().collective)
            distributed.observe_work(progress.own().advance)
            with handle_signals(signal.SIG_DFL):  # PyTorch's wait for the other ranks would delay a handler in Python
                world = distributed.start(namespace=f"{run_dir.name}/{stage}/{os.environ.get(ATTEMPT, '0')}")
            if world.rank == 0 and world.device.type == "cpu" and may_have_gpus():
                print(WITHOUT_GPU.format(stage=stage), file=sys.stderr, flush=True)
            run_stage(config, run_dir / stage)
            distributed.stop()
            _send({"status": 0})
    except BaseException as problem:
        # End at once: other ranks may wait in a collective that this rank will never join.
        _end_process(_report(problem))
    sys.exit(0)


def _end_process(status: int) -> None:
    """End this process, but do not free its objects: nanobind in Triton 3.9 would report the frozen ones as leaked."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def write_stack_on_request() -> None:
    """Write the Python stack when the launcher sends SIGUSR2; the handler in C also works inside a collective.

    Only the stack of the thread that gets the signal, which is the main thread: to read the stack of a thread that runs
    crashes the process.
    """
    if STACK in os.environ:
        faulthandler.register(signal.SIGUSR2, file=int(os.environ[STACK]), all_threads=False)
    progress.own()  # the first change of the row allows the launcher to send the signal


def _check_folder(stage_dir: Path) -> None:
    """Raise UserError if this machine does not see the configuration that the first machine has written."""
    if not (stage_dir / "config.yaml").exists():
        raise UserError(
            f"{stage_dir} has no config.yaml on the machine {socket.gethostname()}, but the first machine has written "
            "it: the run folder must be on a file system that all machines share; set run_dir= to such a folder"
        )


def read_config(stage_dir: Path) -> RunConfig:
    """Return the configuration that the launcher wrote for a stage."""
    return RunConfig.model_validate(load_yaml((stage_dir / "config.yaml").read_text(encoding="utf-8")))


def _report(problem: BaseException) -> int:
    """Send the error to the launcher, and return the exit status."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    if isinstance(problem, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(problem, SystemExit) and not problem.code:
        return 0  # the launcher notices that the stage is not finished
    advice = str(problem) if isinstance(problem, RestartStage) else advise(problem)
    status = RESTART if isinstance(problem, RestartStage) else CRASHED if advice is None else USER_ERROR
    text = "".join(traceback.format_exception(problem))
    record = {
        "status": status,
        "time": time.time(),
        "message": printable(advice or in_keys(f"{type(problem).__name__}: {problem}"))[:MESSAGE_LENGTH],
        "traceback": printable(text)[-TRACEBACK_LENGTH:],
    }
    _send(record)
    return status


def _send(record: dict[str, Any]) -> None:
    """Send a record to the launcher. Without a launcher, print the error of the record."""
    pipe = os.environ.get(FAILURE_PIPE)
    if pipe is None:
        if "message" in record:
            print(
                record["traceback"] if record["status"] == CRASHED else f"error: {record['message']}", file=sys.stderr
            )
        return
    line = json.dumps(record, ensure_ascii=False).encode(errors="replace")  # escapes may have 12 bytes
    with contextlib.suppress(OSError):
        os.write(int(pipe), line + b"\n")


def _end_with_launcher() -> None:
    """End this process when the launcher ends for any reason: by prctl on Linux, by polling on other systems."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_launcher, args=(int(launcher),), daemon=True).start()
    if os.getppid() != int(launcher):  # the launcher ended before the call of prctl
        os._exit(CRASHED)


def _watch_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os._exit(CRASHED)
