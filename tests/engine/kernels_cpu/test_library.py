"""C kernels are compiled once for each machine. Without a compiler, PyTorch computes instead."""

import ctypes
import os
import pwd
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from engine.kernels_cpu import library as module
from tests.ranks import Worker

SOURCE = """
int answer(void) {
    int sum = 0;
#pragma omp parallel num_threads(2) reduction(+ : sum)
    sum += 21;
    return sum;
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "answer.c").write_text(SOURCE)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(module.SWITCH, raising=False)
    return tmp_path


def openmp_libraries() -> set[str]:
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {path for path in loaded if "libgomp" in path or "libiomp5" in path}


def cached_files(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "zerochat" / "kernels").iterdir())


library = module.library.__wrapped__  # the uncached function: this process's cache of kernels stays unchanged
# Workers import this module too. A compilation at import would write into the folder of a test.
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC") or "cc") is None, reason="no C compiler")


@needs_compiler
def test_a_file_is_compiled_once_and_runs_on_pytorchs_threads(folder: Path) -> None:
    before = openmp_libraries()
    actual = library("answer")
    assert isinstance(actual, ctypes.CDLL) and actual.answer() == 42
    (compiled,) = cached_files(folder)
    time = compiled.stat().st_mtime_ns
    assert library("answer").answer() == 42 and compiled.stat().st_mtime_ns == time
    assert openmp_libraries() == before


@needs_compiler
def test_another_source_or_header_is_another_file(folder: Path) -> None:
    assert library("answer").answer() == 42
    (folder / "answer.c").write_text('#include "number.h"\nint answer(void) { return NUMBER; }')
    for number in (5, 6):
        (folder / "number.h").write_text(f"enum {{ NUMBER = {number} }};")
        assert library("answer").answer() == number
    assert len(cached_files(folder)) == 3


@needs_compiler
def test_the_output_of_a_failed_compiler_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\n{os.environ.get("CC") or "cc"} "$@"\nexit 1\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert library("answer") is None and cached_files(folder) == []


@needs_compiler
def test_exact_files_keep_the_order_of_sums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_LIBRARIES", ("answer",))
    (folder / "answer.c").write_text("float rest(float a, float b) { return (a + b) - a; }")
    actual = library("answer")
    actual.rest.argtypes, actual.rest.restype = [ctypes.c_float, ctypes.c_float], ctypes.c_float
    assert actual.rest(1.0, 1e-9) == 0.0  # the result is 1e-9 if the compiler may reorder the sum


@needs_compiler
def test_the_compiler_may_have_a_wrapper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"env {os.environ.get('CC') or 'cc'}")
    assert library("answer").answer() == 42


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("no compiler", "there is no C compiler"),
        ("a compiler that fails", "/bin/false: "),
        ("switched off", "ZEROCHAT_HOST_KERNELS=0"),
        ("a source that is wrong", "answer.c:1:1: error: unknown type name"),
        ("another system", "the system is not Linux"),
    ],
)
def test_without_a_compiler_there_is_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str, reason: str
) -> None:
    monkeypatch.setattr(module, "unavailable", {})
    monkeypatch.setattr(module, "library", library)
    if way == "another system":
        monkeypatch.setattr(module.platform, "system", lambda: "Darwin")
    elif way == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
    elif way == "a compiler that fails":
        monkeypatch.setenv("CC", "/bin/false")
    elif way == "switched off":
        monkeypatch.setenv(module.SWITCH, "0")
    else:
        (folder / "answer.c").write_text("not C")
    assert reason in module.load_libraries() and library("answer") is None


@needs_compiler
def test_a_folder_writable_by_others_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = folder / "cache" / "zerochat" / "kernels"
    shared.mkdir(parents=True)
    os.chmod(shared, 0o777)
    (passing := folder / "passing").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passing))
    assert library("answer").answer() == 42
    assert cached_files(folder) == [] and list(passing.iterdir()) == []  # the private folder of this process is removed


@needs_compiler
def test_kernels_work_without_a_writable_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in */zerochat/kernels/*) exit 1;; esac\nexec {os.environ.get("CC") or "cc"} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert library("answer").answer() == 42 and cached_files(folder) == []


@needs_compiler
def test_kernels_work_without_a_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user without an entry in /etc/passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert library("answer").answer() == 42


@needs_compiler
def test_a_damaged_cached_file_is_compiled_again(folder: Path) -> None:
    # Compile without loading, because a process loads each path only once.
    compiled = module._compiled(folder / "answer.c", module.FLAGS, module._cache_folder())
    full = compiled.stat().st_size
    compiled.write_bytes(b"no library")
    assert library("answer").answer() == 42
    assert [file.stat().st_size for file in cached_files(folder)] == [full]


@needs_compiler
def test_an_incomplete_library_is_never_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is killed while its compiler writes. Loading the incomplete file could raise SIGBUS."""
    compiler, half = folder / "compiler", folder / "half"
    compiler.write_text(
        f'#!/bin/sh\n{os.environ.get("CC") or "cc"} "$@" || exit 1\n'
        'case "$*" in *-shared*) for made; do :; done\n'
        f'[ -z "$SLOW" ] || {{ truncate -s 500 "$made"; touch {half}; exec sleep 60; }};; esac\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    killed = Worker(load, folder, environment={"SLOW": "1"})
    while not half.exists():
        assert killed.poll() is None
        time.sleep(0.01)
    assert [file for file in cached_files(folder) if file.suffix == ".so"] == []
    assert library("answer").answer() == 42  # while the other process still compiles
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (compiled,) = (file for file in cached_files(folder) if file.suffix == ".so")
    assert library("answer").answer() == 42 and compiled.stat().st_size > 500


def load(folder: Path) -> None:
    """Load the library in a new process group."""
    os.setpgrp()
    module.HERE = folder
    assert library("answer").answer() == 42
