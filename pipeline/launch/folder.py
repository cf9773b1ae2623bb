"""Find or create the run folder of a command, and lock it against other commands."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from pipeline.config.schema import DataConfig, RunConfig
from pipeline.config.stages import STAGES
from pipeline.data.sources import configured_sources
from pipeline.errors import UserError
from pipeline.files import read_settings
from pipeline.launch.fingerprint import data_source, hash_request
from pipeline.launch.manifest import Manifest

RUNS = Path("runs")


@dataclass
class RunFolder:
    """A locked run folder. This process holds the lock until the process ends or `close` is called."""

    path: Path
    lock: IO[str]
    reason: str = ""
    """Why the launcher selected the folder of an earlier run; "" if it selected none."""
    is_new: bool = False
    """Whether this command created the folder."""

    def drop_unused(self) -> None:
        """Remove the folder after an error, if this command created it and no stage has written results."""
        results = ("metrics.jsonl", "checkpoints", "model", "error.txt", "nan-*")
        if self.is_new and not any(True for name in results for _ in self.path.glob(f"*/{name}")):
            shutil.rmtree(self.path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove unfinished files of `write_atomically` that a killed process left. The lock excludes other writers."""
        for part in (*self.path.glob(".*.part"), *self.path.glob("*/.*.part")):
            with contextlib.suppress(OSError):
                part.unlink()

    def close(self) -> None:
        self.lock.close()


def open_folder(config: RunConfig, stages: list[str], label: str = "") -> RunFolder:
    """Find or create the run folder and lock it. `label` distinguishes the runs of one multirun.

    The keys run_dir= and name= select the folder. Without them the function returns the first of:
    - the newest unfinished run of the same configuration, which then resumes
    - in a multirun, the finished run of the same configuration and label
    - a new folder

    Raise UserError if another process holds the lock of the folder.
    """
    suffix = re.sub(r"[^\w.=,+-]+", "-", label)
    if (path := named_folder(config, suffix)) is not None:
        is_new = _create(path)
        return RunFolder(path, _lock(path), is_new=is_new)
    return _find_earlier(config, stages, suffix) or _create_numbered(config, suffix)


def named_folder(config: RunConfig, suffix: str = "") -> Path | None:
    """Return the folder that run_dir= or name= selects, which may not exist; None without the two keys."""
    if config.run_dir is None and config.name is None:
        return None
    path = Path(config.run_dir) if config.run_dir is not None else RUNS / str(config.name)
    if not suffix:
        return path
    path = path if path.name else path.resolve()  # "." has no name
    return path.with_name(f"{path.name}-{suffix}")


def with_stage_shares(config: RunConfig, run_dir: Path, stages: list[str]) -> RunConfig:
    """Return the configuration with the shares of the stages of this run.

    A share that the user set stays. Otherwise only the stages of this run divide the rows: a stage that runs alone
    reads all of them. If some stages are missing, the stages of a run folder, or those that start from the model of
    another run with the same data, have the shares of that run, so that no stage reads the prompts of an earlier one.
    """
    default = DataConfig.model_fields["stage_shares"].default
    if config.data.stage_shares != default or any(source.builtin for source in configured_sources(config.data)):
        return config
    mixes_sft = "ppo" in stages and config.ppo.ptx_coef > 0  # PPO trains on conversations too
    needed = {name for stage in (["sft", *stages] if mixes_sft else stages) for name in STAGES[stage].shares}
    if needed == default.keys():  # also if an earlier command with this run folder set others
        return config
    actor = [] if config.actor is None else [Path(config.actor), Path(config.actor).parent]
    earlier = (_recorded_shares(folder, config) for folder in (*(run_dir / stage for stage in STAGES), *actor))
    own = {name: share for name, share in default.items() if name in needed}
    shares = next((shares for shares in earlier if needed <= shares.keys()), own)
    return config.model_copy(update={"data": config.data.model_copy(update={"stage_shares": shares})})


def _recorded_shares(stage_dir: Path, config: RunConfig) -> Mapping[Any, float]:
    """Return the shares that a stage ran with; empty without such a stage, and for other data."""
    try:
        data = DataConfig.model_validate(read_settings(stage_dir).get("data"))
    except ValueError:
        return {}
    return data.stage_shares if data_source(data) == data_source(config.data) else {}


def _find_earlier(config: RunConfig, stages: list[str], suffix: str) -> RunFolder | None:
    """Return the newest unfinished run of the configuration, else the newest finished run of the same multirun."""
    unfinished, finished, request = list[Path](), list[Path](), hash_request(config, stages)
    for file in sorted(RUNS.glob("*/manifest.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            manifest = Manifest.read(file.parent)
        except UserError:
            continue
        if manifest.request != request:
            continue
        has_label = bool(suffix) and f"-{suffix}-" in file.parent.name
        if suffix and not has_label and "=" in file.parent.name:
            continue  # the run of another label, which differs only in settings that do not change the result
        if not all(manifest.finished(stage) for stage in stages):
            unfinished.append(file.parent)
        elif has_label:
            finished.append(file.parent)
    resumes = "resumes the unfinished run of the same configuration"
    opens = "the finished run of the same configuration"
    for folder in (*unfinished, *finished):
        try:
            return RunFolder(folder, _lock(folder), opens if folder in finished else resumes)
        except UserError:
            continue  # another process holds the lock of this run
    return None


def _create_numbered(config: RunConfig, suffix: str) -> RunFolder:
    """Create runs/MODEL-DATA-TIME. Append a number if the name exists."""
    names = [config.model.name, config.data.name, suffix, datetime.now().strftime("%Y%m%d-%H%M%S")]
    base = re.sub(r"[^\w.=,+-]+", "-", "-".join(name for name in names if name))
    path, number = RUNS / base, 1
    while not _create(path):
        number += 1
        path = RUNS / f"{base}-{number}"
    return RunFolder(path, _lock(path), is_new=True)


def _create(path: Path) -> bool:
    """Create the folder if it is missing. Return True if the folder is new."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as problem:
        raise UserError(f"cannot create the run folder {path}: {problem.strerror}; set run_dir=FOLDER") from None
    return True


def _lock(path: Path) -> IO[str]:
    """Lock the folder and return the open lock file. The kernel releases the lock when the process ends.

    A file system without locks (Lustre with `noflock`) gives a warning.
    """
    try:
        lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - the open file is the lock
    except OSError as problem:
        raise UserError(f"cannot write in the run folder {path}: {problem.strerror}; set run_dir=FOLDER") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the second one from some network file systems
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        advice = "wait until it ends, end it, or set another name="
        raise UserError(f"{path} is in use by {holder}: {advice}") from None
    except OSError as problem:
        print(
            f"warning: the file system of {path} has no locks ({problem.strerror}): start no second command with this "
            "run folder",
            file=sys.stderr,
        )
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
