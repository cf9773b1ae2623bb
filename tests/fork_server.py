"""Import the modules that ranks and workers need once, and fork the ranks and workers of tests/ranks.py.

The imports take seconds. The server computes nothing, so a forked rank has the state of a new process. All processes
of pytest-xdist use the same servers, which end after the process that started the tests.
"""

import atexit
import faulthandler
import gc
import io
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

# A module that is missing is skipped: a bare GPU machine has no pydantic, which stages need.
MODULES = (
    "engine",
    "peft",
    "transformers.models.llama.modeling_llama",
    "step3_ppo.train",
    "hydra.core.override_parser.overrides_parser",
    "pipeline.launch.command",
    "pipeline.report.report",
)


SHARED = "FORK_SERVERS"  # the variable with the process that started the tests, and the folder of its servers' sockets


def share_fork_servers() -> None:
    """Let the processes that this process starts use the same fork servers, unless it shares those of another one."""
    if SHARED not in os.environ:
        folder = tempfile.mkdtemp(prefix="fork-servers-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[SHARED] = f"{os.getpid()}:{folder}"


def serve(listener: socket.socket, owner: int) -> None:
    """Fork a process for each request until the process `owner` has ended.

    A request consists of a connection, standard output and standard error (a rank), or of a connection and a pipe for
    the output (a worker).
    """
    while is_running(owner):
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        with listener.accept()[0] as request:
            _, descriptors, _, _ = socket.recv_fds(request, 1, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            listener.close()
            (run_rank if len(descriptors) == 3 else run_worker)(Connection(descriptors[0]), *descriptors[1:])
        for descriptor in descriptors:
            os.close(descriptor)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def run_rank(connection: Connection, output: int, errors: int) -> None:
    """Send the process id, receive (environment, device, pickled function and arguments), send the result, and exit.

    The process first waits until every rank has its result, because the others may still use rank 0's store. It skips
    the interpreter's finalization, which takes a second with so many modules.
    """
    os.dup2(output, 1)
    os.dup2(errors, 2)
    connection.send(os.getpid())
    connection.send(call_with_process_group(*connection.recv()))
    with suppress(EOFError, ConnectionResetError):
        connection.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_worker(connection: Connection, output: int) -> None:
    """Fork a process that calls a function without a process group. Send the process id, then the exit status."""
    child = os.fork()
    if child == 0:
        environment, task = connection.recv()
        connection.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environment)

        def call() -> None:
            function, arguments = pickle.loads(task)
            function(*arguments)

        os._exit(exit_status(call))
    os.close(output)
    connection.send(child)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def exit_status(call: Callable[[], object]) -> int:
    """Call a function, and return the exit status of a process that does so. Print the traceback of an error."""
    status: object = 1
    try:
        call()
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


def call_with_process_group(environment: dict[str, str], device: str, task: bytes) -> tuple[bytes | None, str | None]:
    """Start the process group and call a function. Return (result as torch saves it, None) or (None, traceback)."""
    import torch

    from engine.parallel import dist

    os.environ.clear()
    os.environ.update(environment)
    try:
        function, arguments = pickle.loads(task)
        dist.start("test", device=device)
        saved = io.BytesIO()
        torch.save(function(*arguments), saved)
        return saved.getvalue(), None
    except BaseException:
        return None, traceback.format_exc()


if __name__ == "__main__":
    faulthandler.enable()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, but tests stop ranks with it
    gc.disable()
    for name in (*sys.argv[3:], *MODULES):
        with suppress(ImportError):
            import_module(name)
    gc.freeze()  # modules are never garbage, and a collection would copy their memory into each rank
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)  # as in `run_rank`
