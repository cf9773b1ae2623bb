"""Disks that are full, blocked, slow or broken, and folders that vanish or may not be written."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign.scenes import Fault, Missed, NotPossible, Scene
from tests.campaign.undisturbed import HANG_SECONDS, STEPS

FULL = "the disk is full|No space left"
DRAWS = 12  # cases that fill the disk at a random moment
FREE = (0, 0, 4096, 50_000, 300_000, 1_000_000)


def run_tool(*words: str) -> None:
    """Run a command of the system. Raises NotPossible if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossible(f"{' '.join(words[:3])}: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, *words: str) -> Iterator[Path]:
    """Mount a disk on a folder."""
    place.mkdir(exist_ok=True)
    run_tool("mount", *words, str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


@contextmanager
def small_disk(scene: Scene, options: str = "size=64m") -> Iterator[Path]:
    """Put the run on a small disk in memory."""
    with mounted(scene.folder / "disk", "-t", "tmpfs", "-o", options, "tmpfs") as disk:
        scene.run_dir = disk / "run"
        yield disk
        keep(scene)


@contextmanager
def ext4_disk(scene: Scene) -> Iterator[Path]:
    """Put the run on a file system in a file, which can be frozen."""
    image = scene.folder / "image"
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    run_tool("mkfs.ext4", "-q", str(image))
    with mounted(scene.folder / "disk", "-o", "loop", str(image)) as disk:
        scene.run_dir = disk / "run"
        yield disk
        keep(scene)


def keep(scene: Scene) -> None:
    """Resume the run, if that is necessary, on its disk, and move it to a disk that stays."""
    scene.complete()
    moved = scene.folder / "moved"
    shutil.copytree(scene.run_dir, moved)
    scene.run_dir = moved


def fill(disk: Path, free: int) -> Path:
    """Fill a disk but for some bytes, and return the file."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    size = filler.stat().st_size
    os.truncate(filler, max(0, size - free))
    return filler


def full(number: int, scene: Scene) -> None:
    """Fill the disk at a random moment."""
    with small_disk(scene) as disk:
        scene.start()
        scene.reach_any()
        filler = fill(disk, scene.rng.choice(FREE))
        scene.end()
        filler.unlink()


def full_at_start(free: int, scene: Scene) -> None:
    """Fill the disk before the command starts."""
    with small_disk(scene) as disk:
        scene.copy()
        filler = fill(disk, free)
        scene.start()
        scene.end()
        filler.unlink()


def block(scene: Scene) -> None:
    """Block the disk until the command has printed its error message."""
    with ext4_disk(scene) as disk:
        worker = scene.start()
        scene.reach(1)  # before the first step and after the last one, the limit is half an hour
        run_tool("fsfreeze", "-f", str(disk))  # writes all data first, so it may take as long as some steps
        if scene.lines() >= STEPS:
            run_tool("fsfreeze", "-u", str(disk))
            scene.end()
            raise Missed("the last step was logged before the disk was blocked")
        thaw = threading.Timer(HANG_SECONDS + 90, run_tool, ["fsfreeze", "-u", str(disk)])
        thaw.start()
        seen = b""
        while b"error: " not in seen and thaw.is_alive():
            os.set_blocking(worker._output.fileno(), False)
            seen += worker._output.read() or b""
            time.sleep(0.1)
        os.set_blocking(worker._output.fileno(), True)
        in_time = thaw.is_alive()
        thaw.cancel()
        if in_time:
            time.sleep(1)
            run_tool("fsfreeze", "-u", str(disk))
        scene.end()
        scene.output = seen.decode() + scene.output
        assert in_time, f"no message while the disk was blocked: {scene.output}"


def thin(scene: Scene) -> None:
    """Fill the disk below the file system: writes fail with an I/O error."""
    with mounted(scene.folder / "below", "-t", "tmpfs", "-o", "size=120m", "tmpfs") as below:
        image = below / "image"
        with open(image, "wb") as file:
            file.truncate(256 << 20)
        run_tool("mkfs.ext4", "-q", str(image))
        with mounted(scene.folder / "disk", "-o", "loop", str(image)) as disk:
            scene.run_dir = disk / "run"
            scene.copy()
            run_tool("sync", "-f", str(disk))  # earlier stages are older than the fault
            scene.start()
            scene.reach_any()
            filler = fill(below, 0)
            scene.end()
            filler.unlink()
        subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, check=False)
        with mounted(scene.folder / "disk", "-o", "loop", str(image)):
            keep(scene)


def disk(name: str, act: Callable[[Scene], None], says: str, statuses: tuple[int, ...], **more: Any) -> Fault:
    return Fault("disk", name, act, says, statuses, **more)


def cases() -> list[Fault]:
    """Return the cases."""
    stages, survives, both = ("sft", "reward", "ppo"), "^(?!.*error:)", (0, 2)
    broken = f"the disk is full|writing failed|Input/output error|Read-only file system|{survives}"
    found = [
        disk(f"full at a random moment, {number}", partial(full, number), f"{survives}|{FULL}", both,
             stage=stages[number % 3], ranks=1 + number % 2)
        for number in range(DRAWS)
    ]  # fmt: skip
    found += [
        disk(f"full at the start but for {free} bytes", partial(full_at_start, free), FULL, (2,), stage="sft")
        for free in (0, 60_000)
    ]
    return [
        *found,
        disk("blocked, PPO", block, "rank 0 .host", (5,), ranks=2),
        disk("blocked, SFT", block, "rank 0 .host", (5,), stage="sft"),
        disk("full below the file system, PPO", thin, broken, both),
        disk("full below the file system, SFT", thin, broken, both, stage="sft", ranks=2),
    ]  # fmt: skip
