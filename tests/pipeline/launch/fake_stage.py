"""A stage without torch for the tests of the launcher. The variable FAKE_STAGE selects its behaviour.

"ok" writes a model and a summary. Other values are "BEHAVIOUR", or "BEHAVIOUR:RANK" for a single rank:

- user: a UserError; crash: a RuntimeError; long: one with a long message; kill: SIGKILL to itself
- unread: a print to a pipe without a reader
- slow: sleep for a second; hang: sleep for a long time; deaf: like hang, and ignore signals
- prints: print a Chinese word
- exit: status 0 without a result, as after os._exit(0) in a user's function; loader: status 127
- works: a step without collectives that is longer than `hang_seconds`, in parts that it notes
- stopped: SIGSTOP to itself, mixed: another collective; the other ranks wait in a collective
- echo: rank 1 has a UserError and rank 0 crashes because of it; lost: likewise, but rank 1 exits with status 0

With several behaviours, such as "kill:0,stopped:1", each start uses the next one, and "ok" after the last.
"""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path


def run(config, folder):
    rank, rest = os.environ["RANK"], os.environ.get("FAKE_STAGE", "ok")
    if "," in rest:
        start = int(os.environ["ZEROCHAT_ATTEMPT"].partition(".")[2] or 0)
        rest = [*rest.split(","), "ok"][start]
    behaviour, _, only = rest.partition(":")
    (folder / f"rank-{rank}.json").write_text(json.dumps({**os.environ, "PID": os.getpid(), "GROUP": os.getpgrp()}))
    if behaviour in ("stopped", "mixed"):
        hang(behaviour if only == rank else "wait", config.engine.hang_seconds)
    if behaviour == "works":
        work(config.engine.hang_seconds)
    if only and only != rank:
        time.sleep(60)
    if behaviour in ("echo", "lost"):
        behaviour = {"echo": "user", "lost": "exit"}[behaviour] if rank == "1" else "crash"
        while not (folder / "rank-1.json").exists():
            time.sleep(0.01)
        time.sleep(0.2 if rank == "0" else 0.0)
    act(behaviour)
    if rank == "0":
        (folder / "starts").open("a").write("x")
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps({"lr": getattr(config, folder.name).lr}))
        (folder / "summary.json").write_text(json.dumps({"final": {"eval_loss": 0.25}, "gold_score": 0.5}))


def act(behaviour):
    from pipeline.errors import UserError

    if behaviour == "user":
        raise UserError("data.path=x.jsonl: line 3 is not JSON")
    if behaviour == "crash":
        raise RuntimeError("a bug")
    if behaviour == "long":  # characters that end a line for str.splitlines, or take 4 bytes or JSON's escapes
        raise RuntimeError("\U0001f600" * 3900 + "\u2028\ud800" + '"' * 20_000)
    if behaviour == "unread":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        print("lost", flush=True)
    if behaviour == "prints":
        print("\u7b54")
    if behaviour == "exit":
        os._exit(0)
    if behaviour == "loader":
        os._exit(127)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if behaviour in ("hang", "deaf"):
        time.sleep(60)
    if behaviour == "slow":
        time.sleep(1)


def work(hang_seconds):
    from pipeline import progress

    progress.own().configure(hang_seconds)
    progress.own().begin_step(3, None)
    end = time.monotonic() + hang_seconds + 3
    while time.monotonic() < end:
        time.sleep(0.2)
        sys.modules["engine.distributed"].note_work()


def hang(how, hang_seconds):
    from pipeline import progress

    own = progress.own()
    own.configure(hang_seconds)
    own.begin_step(3, None)
    with own.phase("train"):
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        with own.collective("all_reduce" if how == "mixed" else "all_gather", (4,)):
            time.sleep(600)


def without_torch():
    """Replace the engine by a module whose process group does nothing."""
    engine, distributed = types.ModuleType("engine"), types.ModuleType("engine.distributed")
    world = types.SimpleNamespace(rank=int(os.environ["RANK"]), device=types.SimpleNamespace(type="cpu"))
    distributed.start, distributed.stop, engine.distributed = (lambda namespace: world), (lambda: None), distributed
    distributed.observe_collectives = lambda observer: None
    distributed.observe_work = lambda observer: setattr(distributed, "note_work", observer)
    sys.modules.update({"engine": engine, "engine.distributed": distributed})


if __name__ == "__main__":
    from pipeline.launch.worker import stage_main

    if os.environ.get("FAKE_STAGE_TORCH") != "1":
        without_torch()
    newest = max(Path(sys.argv[2]).glob("*/config.yaml"), key=lambda file: file.stat().st_mtime_ns)
    stage_main(newest.parent.name, __spec__.name)
