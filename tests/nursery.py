"""The process that tests/ranks.py starts once for each rank number: it imports what ranks need, which takes seconds,
and forks itself for each task. It computes nothing, so a rank is as good as freshly started.
"""

import io
import os
import pickle
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

import torch

from engine.parallel import dist

# Imported ahead where they are there: a bare GPU machine has no pydantic, which stages need.
MORE = ("engine", "peft", "transformers.models.llama.modeling_llama", "step3_ppo.train")


def serve(connection: Connection) -> None:
    """Until the other end closes: takes (environment, pickled function and arguments), forks, and sends three things:
    the child's process id, what `rank` says, and the status that the child ended with.
    """
    while True:
        try:
            environment, task = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            connection.send(os.getpid())
            connection.send(rank(environment, task))
            return
        connection.send(os.waitpid(child, 0)[1])


def rank(environment: dict[str, str], task: bytes) -> tuple[bytes | None, str | None]:
    """Runs a task with the process group up: the result, as torch saves it, or the traceback."""
    os.environ.clear()
    os.environ.update(environment)
    try:
        function, arguments = pickle.loads(task)
        dist.start("test", device="cpu")
        kept = io.BytesIO()
        torch.save(function(*arguments), kept)
        return kept.getvalue(), None
    except BaseException:
        return None, traceback.format_exc()
    finally:
        dist.stop()


if __name__ == "__main__":
    for name in MORE:
        with suppress(ImportError):
            import_module(name)
    serve(Connection(int(sys.argv[1])))
