"""The run folder: which one a command means, and that no two commands work in it at once."""

import fcntl
import os
import re
import shutil
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Literal

from pipeline.config.schema import RunConfig
from pipeline.errors import UserError
from pipeline.launch.manifest import Manifest, request

RUNS = Path("runs")


@dataclass
class RunFolder:
    """A run folder that this process holds the lock of, until it ends or `close` is called."""

    path: Path
    lock: IO[str]
    found: Literal["", "unfinished", "finished"] = ""
    """How far the earlier run of the same command is that this folder has, where one was looked for and found."""
    made: bool = False
    """True where this command made the folder."""

    def drop_unused(self) -> None:
        """After a refusal: remove a folder that this command made, where no stage took a step or left anything."""
        begun = ("metrics.jsonl", "checkpoints", "model", "error.txt", "nan-*")
        if self.made and not any(True for name in begun for _ in self.path.glob(f"*/{name}")):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        self.lock.close()


def open_folder(config: RunConfig, stages: list[str], label: str = "") -> RunFolder:
    """Find or make the run folder and lock it. `label` tells the runs of one multirun apart.

    run_dir= and name= say which. Without them the newest unfinished run of the same configuration goes on; where there
    is none, a run of a multirun that is finished stays so, and else a new run is made. Raises UserError where another
    process is at work in the folder.
    """
    suffix = re.sub(r"[^\w.=,+-]+", "-", label)
    if config.run_dir is not None or config.name is not None:
        path = Path(config.run_dir) if config.run_dir is not None else RUNS / str(config.name)
        path = path.with_name(f"{path.name}-{suffix}") if suffix else path
        made = _made(path)
        return RunFolder(path, _lock(path), made=made)
    return _earlier(config, stages, suffix) or _new(config, suffix)


def _earlier(config: RunConfig, stages: list[str], suffix: str) -> RunFolder | None:
    """The newest unfinished run of the same configuration, or the newest finished one of the same multirun."""
    unfinished, finished = list[Path](), list[Path]()
    for file in sorted(RUNS.glob("*/manifest.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            manifest = Manifest.read(file.parent)
        except UserError:
            continue
        if manifest.asked != request(config, stages):
            continue
        if not all(manifest.finished(stage) for stage in stages):
            unfinished.append(file.parent)
        elif suffix and f"-{suffix}-" in file.parent.name:
            finished.append(file.parent)
    for folder in (*unfinished, *finished):
        try:
            return RunFolder(folder, _lock(folder), "finished" if folder in finished else "unfinished")
        except UserError:
            continue  # that run is being worked on: this is another one
    return None


def _new(config: RunConfig, suffix: str) -> RunFolder:
    parts = [config.model.name, config.data.name, suffix, datetime.now().strftime("%Y%m%d-%H%M%S")]
    base = re.sub(r"[^\w.=,+-]+", "-", "-".join(part for part in parts if part))
    number = 1
    while True:
        path = RUNS / (base if number == 1 else f"{base}-{number}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return RunFolder(path, _lock(path), made=True)
        except FileExistsError:
            number += 1
        except OSError as problem:
            raise UserError(f"cannot make the run folder {path}: {problem.strerror}; run_dir= takes another") from None


def _made(path: Path) -> bool:
    """Have a folder there; whether it is a new one."""
    new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"cannot make the run folder {path}: {problem.strerror}; run_dir= takes another") from None
    return new


def _lock(path: Path) -> IO[str]:
    """Hold the folder's lock. The kernel frees it when the process ends, however it ends."""
    try:
        lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - the open file is the lock
    except OSError as problem:
        raise UserError(f"cannot write in the run folder {path}: {problem.strerror}; run_dir= takes another") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        advice = "wait for it, end it, or choose another name="
        raise UserError(f"{path} is being worked on by {holder}: {advice}") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
