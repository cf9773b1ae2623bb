"""Files of the nvme tiers: their space, their end, and what happens when a disk does not do as it should."""

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig
from engine.offload import blocks
from engine.offload.blocks import aligned
from engine.offload.files import PrivateFile, settle
from engine.offload.layout import BLOCK, lay_out
from engine.offload.stores import BUFFERS, FileStore
from tests.engine.offload.test_tiers import TIERS, advance, engine_of

NVME = TIERS[1]


def refuse(number: int) -> Any:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


def test_layout_covers_every_element_once() -> None:
    sizes = [5, 3 * BLOCK + 1, 0, 2 * BLOCK, 7]
    layout = lay_out(sizes, 2 * BLOCK)
    for index, size in enumerate(sizes):
        found = [(group, piece) for group in layout.groups for piece in group.pieces if piece.parameter == index]
        pieces = [(piece.start, piece.stop, group.start + piece.offset) for group, piece in found]
        assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])][: len(pieces)]
        assert sum(stop - start for start, stop, _ in pieces) == size
        assert all(place == layout.offsets[index] + start for start, _, place in pieces)
    assert all(offset % BLOCK == 0 for offset in layout.offsets)
    assert [group.start for group in layout.groups[1:]] == [group.stop for group in layout.groups[:-1]]


def test_a_walk_keeps_what_is_changed_and_holds_a_few_sub_groups(tmp_path: Path) -> None:
    layout = lay_out([20 * BLOCK, 17], BLOCK)
    store = FileStore(layout, ["parameter", "exp_avg"], str(tmp_path))
    for shard, size in enumerate(layout.sizes):
        store.write("parameter", shard, torch.arange(size, dtype=torch.float32))
    for _ in range(2):
        for _, states in store.walk(layout.groups, read=["parameter"], write=["parameter", "exp_avg"]):
            states["exp_avg"].copy_(states["parameter"])
            states["parameter"].add_(1.0)
    assert torch.equal(store.read("parameter", 0), torch.arange(20 * BLOCK) + 2.0)
    assert torch.equal(store.read("exp_avg", 1), torch.arange(17) + 1.0)
    assert store.buffer_bytes == BUFFERS * 2 * 4 * BLOCK


def test_a_file_has_no_name_and_gives_its_space_back(tmp_path: Path) -> None:
    file = PrivateFile(str(tmp_path), 2**20)
    assert list(tmp_path.iterdir()) == [] and os.fstat(file._plain).st_nlink == 0
    assert os.fstat(file._plain).st_blocks * 512 >= 2**20
    descriptor = file._plain
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_no_room_is_known_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match=r"has no room for .* GiB .*nvme_path") as found:
        engine_of(NVME, nvme_path=str(tmp_path))
    assert found.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="no file can be made in"):
        engine_of(NVME, nvme_path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_stops_the_run(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    engine = engine_of(NVME)
    advance(engine, 1, 1)
    monkeypatch.setattr(os, "pwritev", refuse(number))
    with pytest.raises(OSError, match="offload file in") as found:
        advance(engine, 2, 3)
    assert found.value.errno == number


def test_after_a_disk_failed_the_last_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A mapping that notes what is to be read, and can't be written back."""

    def __init__(self, pages: Any) -> None:
        self.pages, self.ahead = pages, list[int]()

    def madvise(self, what: int, start: int = 0, *size: int) -> None:
        if what == mmap.MADV_WILLNEED:
            self.ahead.append(start)
        self.pages.madvise(what, start, *size)

    def flush(self) -> None:
        refuse(errno.EIO)()


def test_mapped_shards_are_read_ahead_and_what_can_not_be_written_back_stops_the_run() -> None:
    engine = engine_of({"offload_optimizer": "nvme", "offload_parameters": "nvme"}, zero_stage=3)
    mapped: Any = engine._mapped
    mapped.settle()
    mapped._pages = Watched(mapped._pages)
    advance(engine, 1, 1)
    places = [start for start, _ in mapped._spans]
    forward, backward = [2, 3, 3], [0, 1, 0]  # the root is 0; two units ahead of each of three blocks
    assert mapped._pages.ahead == [places[unit] for unit in forward + backward]
    with pytest.raises(OSError, match="Input/output"):
        advance(engine, 2, 2)


def test_a_file_that_became_shorter_stops_the_run() -> None:
    engine = engine_of(NVME)
    advance(engine, 1, 1)
    store: Any = engine.optimizer.tiers[0].store  # type: ignore[union-attr]
    store.settle()
    os.ftruncate(store._file._plain, 4096)
    with pytest.raises(OSError, match="too early"):
        advance(engine, 2, 2)


def test_without_direct_io_files_go_through_the_page_cache_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = advance(engine_of(NVME), 1, 3)
    opened = os.open

    def no_direct(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        return refuse(errno.EINVAL)() if flags & os.O_DIRECT else opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_direct)
    with caplog.at_level(logging.WARNING, logger=blocks.log.name):
        engines = [engine_of(NVME, nvme_path=str(tmp_path)) for _ in range(2)]
    assert len([record for record in caplog.records if "no direct I/O" in record.message]) == 1
    assert [advance(engine, 1, 3) for engine in engines] == [wanted, wanted]


def test_direct_io_that_is_refused_later_falls_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PrivateFile(str(tmp_path), 8192)
    if file._direct == file._plain:
        pytest.skip("this file system takes no direct I/O")
    direct, written = file._direct, os.pwritev

    def refusing(descriptor: int, *rest: Any) -> int:
        return refuse(errno.EINVAL)() if descriptor == direct else written(descriptor, *rest)

    monkeypatch.setattr(os, "pwritev", refusing)
    values = aligned(2048).copy_(torch.arange(2048))
    settle(file.write(values, 0))
    again = aligned(2048)
    settle(file.read(again, 0))
    assert torch.equal(again, values)


def test_parts_that_are_not_aligned(tmp_path: Path) -> None:
    file = PrivateFile(str(tmp_path), 8192)
    settle(file.write(torch.arange(100, dtype=torch.float32), 12))
    found = torch.zeros(50)
    settle(file.read(found, 12 + 4 * 25))
    assert torch.equal(found, torch.arange(25, 75, dtype=torch.float32))


def test_what_can_not_go_together() -> None:
    with pytest.raises(ValueError, match="needs zero_stage=3"):
        EngineConfig(offload_parameters="nvme", zero_stage=2)
    with pytest.raises(ValueError, match="offload_ratio"):
        EngineConfig(offload_ratio=1.5)
    with pytest.raises(ValueError, match="needs offload_optimizer"):
        engine_of({"offload_parameters": "nvme"}, zero_stage=3)
