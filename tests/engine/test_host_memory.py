"""The host memory of a process in a container, and the reuse of freed memory (by page faults of a new process)."""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from engine import host_memory as memory
from tests.ranks import Worker

GIB = 2**30
LARGE, SMALL = 2**26, 2**24  # bytes of a tensor
HUGE_PAGE = 2**21  # bytes; a fault brings one page, which may be huge


def faults_of_last(size: int) -> int:
    """Return the page faults of the last of 16 tensors of `size` bytes, each freed before the next.

    One of the first 8 may need new memory although a block is free: glibc aligns a tensor within a larger block, keeps
    the rest for later, and the block that comes back is then a few bytes too small.
    """
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(size, dtype=torch.uint8).fill_(1)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults


def print_by_default() -> None:
    print(faults_of_last(LARGE), faults_of_last(SMALL))


def print_reused() -> None:
    """Print the faults with reuse, and the resident bytes that it adds, before and after they are returned."""
    start = psutil.Process().memory_info().rss
    memory.reuse_freed_memory()
    faults, used = faults_of_last(LARGE), psutil.Process().memory_info().rss - start
    memory.return_freed_memory()
    print(faults, used, psutil.Process().memory_info().rss - start)


def print_returned() -> None:
    memory.reuse_freed_memory()
    memory.return_freed_memory()
    print(faults_of_last(SMALL))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator is glibc's")
def test_freed_blocks_are_reused_until_memory_must_be_returned() -> None:
    """By default, glibc returns a block above 32 MiB when it is freed, and reuses a smaller one."""
    workers = [Worker(function, environment={}) for function in (print_by_default, print_reused, print_returned)]
    default, reused, returned = (list(map(int, worker.communicate()[0].split())) for worker in workers)
    assert default[0] >= LARGE // HUGE_PAGE and default[1] < 4
    assert reused[0] < 4 and reused[1] > LARGE and reused[2] < LARGE / 2
    assert returned[0] >= SMALL // HUGE_PAGE


def write_group(folder: Path, names: tuple[str, str, str], limit: int | str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {inactive}\n")


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("is_visible", [True, False], ids=["a job of Slurm", "a container"])
def test_a_control_group_limits_the_host_memory(
    version: int, is_visible: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container sees its own group as the root. A job of Slurm has its limit in a parent of its group."""
    machine = SimpleNamespace(total=2000 * GIB, available=1900 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    assert memory.host_memory(tmp_path) == (2000 * GIB, 1900 * GIB)
    names = memory._GROUP_FILES[version != 2]
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "0::/job_7/step_0" if version == 2 else "4:cpu,memory:/job_7/step_0"
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    root = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    write_group(root / "job_7" if is_visible else root, names, 100 * GIB, 30 * GIB, 10 * GIB)
    if is_visible:
        write_group(root / "job_7/step_0", names, "max" if version == 2 else 2**63 - 4096, 30 * GIB, 0)
    assert memory.host_memory(tmp_path) == (100 * GIB, 80 * GIB)


def test_memory_that_the_driver_does_not_pin_is_a_mistake_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(code: int) -> None:
        raise RuntimeError(f"out of memory ({code})")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", raise_error)
    with pytest.raises(ValueError, match=r"0\.50 GiB .* \(out of memory \(2\)\)\. .*Set offload_optimizer=none"):
        memory.pinned(GIB // 8, torch.float32)
