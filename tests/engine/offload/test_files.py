"""Files of the NVMe tiers: reserved space, removal, and disk failures."""

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig
from engine.offload import direct_io
from engine.offload.direct_io import ScratchFile
from engine.offload.layout import BLOCK, flat_layout
from engine.offload.nvme import BUFFERS, NvmeStates
from tests.engine.offload.test_tiers import TIERS, advance, engine_of

NVME = TIERS[1]


def refuse(number: int) -> Any:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


def test_layout_covers_every_element_once() -> None:
    sizes = [5, 3 * BLOCK + 1, 0, 2 * BLOCK, 7]
    layout = flat_layout(sizes, 2 * BLOCK)
    for index, size in enumerate(sizes):
        found = [(group, s) for group in layout.sub_groups for s in group.segments if s.shard == index]
        segments = [(s.start, s.stop, group.start + s.offset) for group, s in found]
        assert [start for start, _, _ in segments] == [0, *(stop for _, stop, _ in segments[:-1])][: len(segments)]
        assert sum(stop - start for start, stop, _ in segments) == size
        assert all(offset == layout.offsets[index] + start for start, _, offset in segments)
    assert all(offset % BLOCK == 0 for offset in layout.offsets)
    assert [group.start for group in layout.sub_groups[1:]] == [group.stop for group in layout.sub_groups[:-1]]


def test_iterate_stores_changes_and_holds_a_few_sub_groups(tmp_path: Path) -> None:
    layout = flat_layout([20 * BLOCK, 17], BLOCK)
    store = NvmeStates(layout, ["parameter", "exp_avg"], str(tmp_path))
    for shard, size in enumerate(layout.sizes):
        store.write("parameter", shard, torch.arange(size, dtype=torch.float32))
    for _ in range(2):
        for _, states in store.iterate(layout.sub_groups, read=["parameter"], write=["parameter", "exp_avg"]):
            states["exp_avg"].copy_(states["parameter"])
            states["parameter"].add_(1.0)
    assert torch.equal(store.read("parameter", 0), torch.arange(20 * BLOCK) + 2.0)
    assert torch.equal(store.read("exp_avg", 1), torch.arange(17) + 1.0)
    assert store.buffer_bytes == BUFFERS * 2 * 4 * BLOCK


def test_a_file_has_no_name_and_frees_its_space(tmp_path: Path) -> None:
    file = ScratchFile(str(tmp_path), 2**20)
    assert list(tmp_path.iterdir()) == [] and os.fstat(file.descriptor).st_nlink == 0
    assert os.fstat(file.descriptor).st_blocks * 512 >= 2**20
    descriptor = file.descriptor
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_full_disk_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match=r"nvme_path=.* has no room for .* GiB") as found:
        engine_of(NVME, nvme_path=str(tmp_path))
    assert found.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"nvme_path=.*nowhere: cannot create a file"):
        engine_of(NVME, nvme_path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_stops_the_run(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    engine = engine_of(NVME)
    advance(engine, 1, 1)
    monkeypatch.setattr(os, "pwritev", refuse(number))
    with pytest.raises(OSError, match="offload file in") as found:
        advance(engine, 2, 3)
    assert found.value.errno == number


def test_the_last_checkpoint_survives_a_disk_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(NVME)
    advance(engine, 1, 2)
    engine.save(tmp_path / "last")
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", refuse(errno.EIO))
        with pytest.raises(OSError, match="offload file in"):
            advance(engine, 3, 5)
    through, again = engine_of(NVME), engine_of(NVME, seed=9)
    advance(through, 1, 2)
    again.load(tmp_path / "last")
    assert advance(again, 3, 5) == advance(through, 3, 5)


class Watched:
    """A mapping that records reads ahead, and fails to write."""

    def __init__(self, pages: Any) -> None:
        self.pages, self.ahead = pages, list[int]()

    def madvise(self, what: int, start: int = 0, *size: int) -> None:
        if what == mmap.MADV_WILLNEED:
            self.ahead.append(start)
        self.pages.madvise(what, start, *size)

    def flush(self) -> None:
        refuse(errno.EIO)()


def test_parameters_are_read_ahead_and_a_failed_flush_stops_the_run() -> None:
    engine = engine_of({"offload_optimizer": "nvme", "offload_parameters": "nvme"}, zero_stage=3)
    mapped: Any = engine._nvme_parameters
    mapped.wait()
    mapped._pages = Watched(mapped._pages)
    advance(engine, 1, 1)
    places = [start for start, _ in mapped._ranges]
    forward, backward = [2, 3, 3], [0, 1, 0]  # the root is 0; two units ahead of each of three blocks
    assert mapped._pages.ahead == [places[unit] for unit in forward + backward]
    with pytest.raises(OSError, match="Input/output"):
        advance(engine, 2, 2)


def test_a_file_that_became_shorter_stops_the_run() -> None:
    engine = engine_of(NVME)
    advance(engine, 1, 1)
    store: Any = engine.optimizer.tiers[0].states  # type: ignore[union-attr]
    store.wait()
    os.ftruncate(store._file.descriptor, 4096)
    with pytest.raises(OSError, match="truncated"):
        advance(engine, 2, 2)


def test_a_file_system_without_direct_io_uses_the_page_cache_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = advance(engine_of(NVME), 1, 3)
    opened = os.open

    def no_direct(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        return refuse(errno.EINVAL)() if flags & os.O_DIRECT else opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_direct)
    with caplog.at_level(logging.WARNING, logger=direct_io.log.name):
        engines = [engine_of(NVME, nvme_path=str(tmp_path)) for _ in range(2)]
    assert len([record for record in caplog.records if "no direct I/O" in record.message]) == 1
    assert [advance(engine, 1, 3) for engine in engines] == [wanted, wanted]


def test_refused_combinations() -> None:
    with pytest.raises(ValueError, match="needs zero_stage=3"):
        EngineConfig(offload_parameters="nvme", zero_stage=2)
    with pytest.raises(ValueError, match="offload_ratio"):
        EngineConfig(offload_ratio=1.5)
    with pytest.raises(ValueError, match="needs offload_optimizer"):
        engine_of({"offload_parameters": "nvme"}, zero_stage=3)
