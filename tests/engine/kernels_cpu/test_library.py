"""C kernels are compiled once, for this machine, and done without where they can't be."""

import ctypes
import os
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


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "zerochat" / "kernels").iterdir())


library = module.library.__wrapped__  # what is kept for the kernels of this process stays as it is
# Workers import this module too: a compilation at import would write into the folder of a test.
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC") or "cc") is None, reason="no C compiler")


@needs_compiler
def test_a_file_is_compiled_once_and_runs_on_pytorchs_threads(folder: Path) -> None:
    before = openmp_libraries()
    found = library("answer")
    assert isinstance(found, ctypes.CDLL) and found.answer() == 42
    (made,) = kept(folder)
    time = made.stat().st_mtime_ns
    assert library("answer").answer() == 42 and made.stat().st_mtime_ns == time
    assert openmp_libraries() == before


@needs_compiler
def test_another_source_is_another_file(folder: Path) -> None:
    assert library("answer").answer() == 42
    (folder / "answer.c").write_text(SOURCE.replace("21", "3"))
    assert library("answer").answer() == 6 and len(kept(folder)) == 2


@needs_compiler
def test_another_header_is_another_file(folder: Path) -> None:
    for number in (5, 6):
        (folder / "number.h").write_text(f"enum {{ NUMBER = {number} }};")
        (folder / "answer.c").write_text('#include "number.h"\nint answer(void) { return NUMBER; }')
        assert library("answer").answer() == number
    assert len(kept(folder)) == 2


@needs_compiler
def test_what_a_compiler_wrote_before_it_failed_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\n{os.environ.get("CC") or "cc"} "$@"\nexit 1\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert library("answer") is None and kept(folder) == []


@needs_compiler
def test_all_files_are_compiled_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "other.c").write_text(SOURCE)
    (folder / "broken.c").write_text("int answer(void) {")
    monkeypatch.setattr(module, "library", library)
    module.load_libraries()
    assert sorted(path.name.partition("-")[0] for path in kept(folder)) == ["answer", "other"]


@needs_compiler
def test_exact_files_round_as_they_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT_LIBRARIES", ("answer",))
    (folder / "answer.c").write_text("float rest(float a, float b) { return (a + b) - a; }")
    found = library("answer")
    found.rest.argtypes, found.rest.restype = [ctypes.c_float, ctypes.c_float], ctypes.c_float
    assert found.rest(1.0, 1e-9) == 0.0  # 1e-9 where the sum may be reordered


@pytest.mark.parametrize("way", ["no compiler", "a compiler that fails", "switched off", "a source that is wrong"])
def test_without_a_compiler_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
    elif way == "a compiler that fails":
        monkeypatch.setenv("CC", "/bin/false")
    elif way == "switched off":
        monkeypatch.setenv(module.SWITCH, "0")
    else:
        (folder / "answer.c").write_text("not C")
    assert library("answer") is None


@needs_compiler
def test_a_folder_that_others_may_write_to_is_not_run_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = folder / "cache" / "zerochat" / "kernels"
    shared.mkdir(parents=True)
    os.chmod(shared, 0o777)
    (passing := folder / "passing").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passing))
    assert library("answer").answer() == 42
    assert kept(folder) == [] and list(passing.iterdir()) == []  # what was made for this process alone is gone


@needs_compiler
def test_a_cache_on_a_full_disk_is_not_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in */zerochat/kernels/*) exit 1;; esac\nexec {os.environ.get("CC") or "cc"} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert library("answer").answer() == 42 and kept(folder) == []


@needs_compiler
def test_a_kept_file_that_is_broken_is_made_anew(folder: Path) -> None:
    made = module._compiled(folder / "answer.c", module.FLAGS, module._kept())  # a process opens a name once
    whole = made.stat().st_size
    made.write_bytes(b"no library")
    assert library("answer").answer() == 42
    assert [file.stat().st_size for file in kept(folder)] == [whole]


@needs_compiler
def test_half_a_library_is_nobodys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while its compiler writes. Loading what it left may end a process (SIGBUS)."""
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
    assert [file for file in kept(folder) if file.suffix == ".so"] == []
    assert library("answer").answer() == 42  # while the other is at it
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (made,) = (file for file in kept(folder) if file.suffix == ".so")
    assert library("answer").answer() == 42 and made.stat().st_size > 500


def load(folder: Path) -> None:
    """Load the library in a process group of its own."""
    os.setpgrp()
    module.HERE = folder
    assert library("answer").answer() == 42


@needs_compiler
def test_processes_that_compile_at_once_do_not_meet(folder: Path) -> None:
    """Each finds whole files only, and one file stays."""
    workers = [Worker(load, folder, environment={}) for _ in range(3)]
    outputs = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], outputs
    assert len(kept(folder)) == 1
